"""SigLIP encoders (arXiv 2303.15343) with the projectors of several models (clip.cpp, models/siglip.cpp)."""

from __future__ import annotations

from llamado.ggml.graph import Graph, cont, mean, mul_mat, permute, reshape, transpose
from llamado.ggml.tensor import Tensor
from llamado.media.chunks import EncoderInput, MediaChunk, Piece
from llamado.media.media import Media, MediaKind
from llamado.media.patches import merged_order, merged_patches
from llamado.media.preprocessing import ImageOptions, fixed_size
from llamado.media.resize import Resize, ResizeFilter
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass, MediaEncoder
from llamado.models.encoders.patches import ORDER, PATCHES, PatchEmbedding, add_positions
from llamado.models.encoders.transformer import EncoderTransformer
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.weights import Weights

_RESIZE = Resize(ResizeFilter.BILINEAR)


class Gemma3Encoder(MediaEncoder):
    """Gemma 3: the means of squares of patches, normed and projected; pictures of one size."""

    @property
    def causal(self) -> bool:
        return False

    def _take_weights(self, weights: Weights) -> None:
        keys = self.keys
        size, patch = keys.int_("image_size"), keys.int_("patch_size")
        self.merge = keys.int_("projector.scale_factor", 4)
        mean, std = keys.colors
        self.options = ImageOptions(
            image_size=size, patch_size=patch, mean=mean, std=std, n_merge=self.merge, resize=_RESIZE
        )
        self.side = size // patch
        if not self.side or self.side % self.merge:
            raise InvalidModel(f"{self.side} patches a side are not divisible into squares of {self.merge}")
        self._transformer = EncoderTransformer(keys, weights)
        n = self._transformer.n_embd
        self._patches = PatchEmbedding.take(weights, patch, n)
        self._positions = weights.shared.require("v.position_embd.weight", n, self.side**2)
        self._norm = weights.shared.require("mm.soft_emb_norm.weight", n)
        self.n_embd = weights.ne("mm.input_projection.weight")[0]
        self._projection = weights.shared.require("mm.input_projection.weight", self.n_embd, n)
        if self._projection.type.block_size > 1:
            raise UnsupportedModel(
                f"'mm.input_projection.weight' is {self._projection.type.name}; F32, F16 or BF16 is expected"
            )

    def prepare(self, media: Media) -> list[Piece]:
        image = fixed_size(media, self.options).image
        arrays = {
            PATCHES: merged_patches(image, self.options.patch_size, self.merge),
            ORDER: merged_order(self.side, self.side, self.merge),
        }
        n = self.side**2
        chunk = MediaChunk(
            kind=MediaKind.IMAGE,
            input=EncoderInput((n,), arrays),
            n_tokens=n // self.merge**2,
            digest=self.digest(media),
            causal=self.causal,
        )
        return ["<start_of_image>", chunk, "<end_of_image>"]

    def build(self, shape: tuple[int, ...]) -> Graph:
        (n_patches,) = shape
        step = EncoderPass(self._transformer.norm_eps)
        x = self._transformer(step, add_positions(step, self._patches(step, n_patches), self._positions))
        x = step.norm(mean_of_groups(x, self.merge**2), self._norm, "soft_emb_norm")
        step.graph.output(EMBEDDINGS, mul_mat(cont(transpose(self._projection)), x))
        return step.graph


def mean_of_groups(x: Tensor, n: int) -> Tensor:
    """Return the means of each `n` consecutive rows: F32 [ne0, ne1 / n]."""
    groups = permute(reshape(x, x.ne[0], n, x.ne[1] // n), 1, 0, 2, 3)
    return reshape(mean(cont(groups)), x.ne[0], x.ne[1] // n)
