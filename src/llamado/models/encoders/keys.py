"""Typed access to the metadata of projector files (`clip.*`), with a valid range for each value."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llamado.gguf.metadata import Metadata
from llamado.media.media import MediaKind
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.keys import MOST_LAYERS, Range

N = TypeVar("N", int, float)

_SIDE = Range(1, 2**14, "pixels of a side; 224 to 1,792 in use")
_TOKENS = Range(0, 2**20, "a number of tokens")
_PIXELS = Range(0, 2**31 - 1, "a number of pixels")
_WIDTH = Range(1, 2**20, "as embedding_length of text models")
_HEADS = Range(1, 2**16, "as attention.head_count of text models")

INTEGERS: dict[str, Range] = {
    "embedding_length": _WIDTH,
    "feed_forward_length": Range(1, 2**24, "as the width, 16 times as much"),
    "block_count": Range(0, MOST_LAYERS, "as many layers as a text model"),
    "projection_dim": _WIDTH,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _HEADS,
    "attention.head_dim": Range(1, 2**16, "as attention.key_length of text models"),
    "image_size": _SIDE,
    "preproc_image_size": _SIDE,
    "patch_size": Range(1, 1024, "pixels of a side; 8 to 48 in use"),
    "image_min_pixels": _PIXELS,
    "image_max_pixels": _PIXELS,
    "preproc_min_tiles": Range(1, 1024, "1 in use"),
    "preproc_max_tiles": Range(1, 1024, "12 in use"),
    "projector.scale_factor": Range(1, 64, "2 to 4 in use"),
    "projector.query_side": Range(1, 1024, "4 in use"),
    "projector.window_side": Range(1, 1024, "8 in use"),
    "spatial_merge_size": Range(1, 64, "2 in use"),
    "n_wa_pattern": Range(0, MOST_LAYERS, "a number of layers"),
    "window_size": Range(1, 2**14, "112 pixels, or hundreds of tokens in use"),
    "sam.head_count": _HEADS,
    "sam.block_count": Range(1, MOST_LAYERS, "12 in use"),
    "sam.embedding_length": _WIDTH,
    "expert_used_count": Range(1, 1024, "as expert_used_count of text models"),
    "num_mel_bins": Range(1, 4096, "80 and 128 in use"),
    "projector.stack_factor": Range(1, 256, "1 to 8 in use"),
    "chunk_size": Range(1, 2**20, "a number of frames"),
    "conv_kernel_size": Range(1, 1024, "5 to 31 in use"),
    "max_pos_emb": Range(1, 2**20, "a number of positions"),
    "projector.window_size": Range(1, 2**14, "15 in use"),
    "projector.downsample_rate": Range(1, 1024, "5 in use"),
    "projector.head_count": _HEADS,
    "rvq.num_quantizers": Range(1, 256, "8 in use"),
    "local_block_count": Range(1, MOST_LAYERS, "6 in use"),
    "local_group_size": Range(1, 1024, "4 in use"),
    "subsampling_factor": Range(1, 64, "8 in use"),
    "minicpmv_version": Range(0, 2**31 - 1, "2 to 6, and 100045"),
    "minicpmv_query_num": Range(0, 2**14, "64 and 96 in use"),
}
"""Integer keys, without `clip.vision.` or `clip.audio.`; those of MiniCPM-V follow `clip.`."""

FLOATS: dict[str, Range] = {
    "attention.layer_norm_epsilon": Range(0, 1, "added to a mean square of about 1"),
    "swiglu_clamp": Range(1e-5, 1e6, "the greatest factor in a gated activation"),
}
_MEAN = Range(-1e3, 1e3, "0 to 1 in use")
_STD = Range(1e-6, 1e3, "colors are divided by it; 0.2 to 1 in use")


def projector_type(metadata: Metadata, kind: MediaKind) -> str:
    """Return the name of the projector for a kind of media. Raises GgufError or UnsupportedModel."""
    own = f"clip.{'vision' if kind is MediaKind.IMAGE else 'audio'}.projector_type"
    found = metadata.str_("clip.projector_type", "") or metadata.str_(own, "")
    if not found:
        raise UnsupportedModel(f"the projector file has no key 'clip.projector_type' or '{own}'")
    return found


class EncoderKeys:
    """Metadata of the encoder for one kind of media: `keys.int_("block_count")` reads `clip.vision.block_count`.

    Only keys in the tables of this module can be read. `min_tokens` and `max_tokens` are the user's limits for a
    picture (`--image-min-tokens`, `--image-max-tokens`); 0: the model's own. `has_token` returns True if the text
    model's vocabulary has a token with a text.
    """

    def __init__(
        self,
        metadata: Metadata,
        kind: MediaKind,
        *,
        min_tokens: int = 0,
        max_tokens: int = 0,
        has_token: Callable[[str], bool] = lambda text: False,
    ) -> None:
        self.metadata, self.kind = metadata, kind
        self.min_tokens, self.max_tokens, self.has_token = min_tokens, max_tokens, has_token
        self.projector = projector_type(metadata, kind)

    def name(self, suffix: str) -> str:
        """Return the full name of a key."""
        if suffix.startswith("minicpmv_"):
            return f"clip.{suffix}"
        return f"clip.{'vision' if self.kind is MediaKind.IMAGE else 'audio'}.{suffix}"

    def has(self, suffix: str) -> bool:
        """Return True if the file has the key."""
        return self.name(suffix) in self.metadata

    def int_(self, suffix: str, default: int | None = None) -> int:
        """Return an integer; required unless there is a default. Raises GgufError or InvalidModel."""
        key = self.name(suffix)
        value = self.metadata.int_(key) if default is None else self.metadata.int_(key, default)
        return value if value is default else self._checked(suffix, value, INTEGERS[suffix])

    def float_(self, suffix: str, default: float | None = None) -> float:
        """Return a number; required unless there is a default. Raises GgufError or InvalidModel."""
        key = self.name(suffix)
        value = self.metadata.float_(key) if default is None else self.metadata.float_(key, default)
        return value if value is default else self._checked(suffix, value, FLOATS[suffix])

    def flag(self, name: str) -> bool:
        """Return the flag `clip.name`; False if the file does not have it. Raises GgufError."""
        return self.metadata.bool_(f"clip.{name}", False)

    def ints(self, suffix: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return an array of integers, each of -1 to 2^20. Raises GgufError or InvalidModel."""
        found = self.metadata.ints(self.name(suffix), default)
        for value in found:
            self._checked(suffix, value, Range(-1, 2**20, "a number of layers, pixels or entries"))
        return found

    @property
    def projection_dim(self) -> int:
        """Width of the embeddings as the file has it; some projectors ignore it."""
        return self.int_("projection_dim")

    @property
    def colors(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of the three colors by which pixels are normalized."""
        mean, std = (self.metadata.floats(self.name(f"image_{which}")) for which in ("mean", "std"))
        if len(mean) < 3 or len(std) < 3:
            raise InvalidModel(f"'{self.name('image_mean')}' and '{self.name('image_std')}' need three values each")
        for value in mean[:3]:
            self._checked("image_mean", value, _MEAN)
        for value in std[:3]:
            self._checked("image_std", value, _STD)
        return mean[:3], std[:3]

    def _checked(self, suffix: str, value: N, range: Range) -> N:
        if range.contains(value):
            return value
        raise InvalidModel(f"metadata key '{self.name(suffix)}' is {value}; {range} is expected")
