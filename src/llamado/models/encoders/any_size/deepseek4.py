"""Vision encoder of DeepSeek V4 (clip.cpp, models/deepseek4v.cpp)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, get_rows
from llamado.ggml.ops import UnaryOp
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput, MediaChunk, Piece
from llamado.media.errors import MediaError
from llamado.media.media import Media
from llamado.media.model_sizes import deepseek4v
from llamado.media.patches import patches
from llamado.media.preprocessing import ImageOptions
from llamado.media.resize import Resize
from llamado.models.encoders.dynamic import image_options
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass, MediaEncoder
from llamado.models.encoders.grids import PatchGrid
from llamado.models.encoders.parts.grid_convolution import Kernel, gather
from llamado.models.encoders.parts.patches import PATCHES, PatchEmbedding
from llamado.models.encoders.parts.projection import Projection
from llamado.models.encoders.parts.rotation import POSITIONS, grid_positions, rotate_halves
from llamado.models.encoders.parts.rows import LAYOUT, merge_by_channel, with_rows
from llamado.models.encoders.parts.transformer import EncoderTransformer, NormKind
from llamado.models.weights import Weights

_THETA = 10_000.0
_FEWEST_TOKENS, _MOST_TOKENS = 16, 384
_MOST_RATIO = 8
_GRAY = 127, 127, 127
ALIGN = 4
"""Tokens of the text model's compressed blocks: the first row of a picture begins at a multiple."""
SQUARES = "squares"
"""Name of an input: the patches of each square, row by row."""


class Block(NamedTuple):
    """The tokens of a picture of `nx` × `ny` squares: padding, a start, pairs of rows, padding and an end.

    Each row ends with a learned embedding, and the rows of a pair alternate token by token. An odd number of rows is
    made even with a row of padding.
    """

    nx: int
    ny: int
    n_before: int

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.n_before + 1 + self._n_rows * (self.nx + 1) + self._n_behind + 1

    @property
    def _n_rows(self) -> int:
        return self.ny + self.ny % 2

    @property
    def _n_behind(self) -> int:
        """Padding that makes the number of tokens of the rows a multiple of 4."""
        return self._n_rows // 2 * (self.nx + 1) % 2 * 2

    def layout(self) -> NDArray[np.int32]:
        """Return the row of each token among those of the squares, then the start, end, row end and padding."""
        n = self.nx * self.ny
        start, end, row_end, padding = range(n, n + 4)
        rows = np.full((self._n_rows, self.nx + 1), padding, np.int32)
        rows[: self.ny, : self.nx] = np.arange(n).reshape(self.ny, self.nx)
        rows[: self.ny, self.nx] = row_end
        pairs = rows.reshape(-1, 2, self.nx + 1).transpose(0, 2, 1).reshape(-1)
        behind = [padding] * self._n_behind
        return np.array([*[padding] * self.n_before, start, *pairs, *behind, end], np.int32)


class DeepSeek4Encoder(MediaEncoder):
    """DeepSeek V4: rotary positions; squares of patches are merged and projected, and learned rows added.

    The shape of an input: columns and rows of patches, and tokens of padding before the picture.
    """

    @property
    def causal(self) -> bool:
        return False

    def _read_options(self) -> ImageOptions:
        """Read the options of preprocessing; the limit of tokens is that of the whole block.

        Raises GgufError or InvalidModel.
        """
        keys, options = self.keys, image_options(self.keys, self.merge, Resize(color=_GRAY))
        area = options.align**2
        most = max(keys.max_tokens, _FEWEST_TOKENS) if keys.max_tokens else _MOST_TOKENS
        fewest_pixels = keys.min_tokens * area if keys.min_tokens else keys.int_("image_min_pixels")
        return replace(
            options,
            min_pixels=min(fewest_pixels, most * area),
            max_tokens=most,
            max_aspect_ratio=_MOST_RATIO,
        )

    def _take_weights(self, weights: Weights) -> None:
        keys, shared = self.keys, weights.shared
        self.patch = keys.int_("patch_size")
        self.merge = keys.int_("projector.scale_factor")
        self.options = self._read_options()
        self._transformer = EncoderTransformer(keys, weights, norm=NormKind.RMS)
        n = self._transformer.n_embd
        self._patches = PatchEmbedding.take(weights, self.patch, n)
        self._projection = Projection.take(shared, "mm.1", "mm.2", n * self.merge**2, UnaryOp.GELU_ERF)
        self.n_embd = self._projection.n_out
        names = (
            *(f"v.token_embd.img_{which}" for which in ("start", "end")),
            "v.image_newline",
            "v.token_embd.img_pad",
        )
        self._learned = [shared.require(name, self.n_embd) for name in names]

    def prepare(self, media: Media) -> list[Piece]:
        pixels = deepseek4v(media, self.options).image

        def place(n_tokens: int) -> MediaChunk:
            """Return the chunk for a place in the prompt: its first row begins a block of tokens."""
            n_before = ALIGN - 1 - n_tokens % ALIGN
            given = self.input(pixels, n_before)
            n = self._block(PatchGrid(*given.shape[:2]), n_before).n
            return MediaChunk(self.kind, given, n, self.digest(media, n_before), causal=self.causal)

        return [place]

    def _block(self, grid: PatchGrid, n_before: int) -> Block:
        return Block(-(-grid.nx // self.merge), -(-grid.ny // self.merge), n_before)

    def input(self, pixels: NDArray[np.float32], n_before: int) -> EncoderInput:
        """Return the input for a prepared picture, float32 [height, width, 3]. Raises MediaError."""
        height, width, _ = pixels.shape
        if height % self.patch or width % self.patch or not height or not width:
            raise MediaError(f"a picture of {width} × {height} pixels is not made of squares of {self.patch} pixels")
        grid = PatchGrid(width // self.patch, height // self.patch)
        numbers = np.arange(grid.n, dtype=np.int32)
        block = self._block(grid, n_before)
        # What is missing in the last squares is padding.
        margin = max(block.nx * self.merge - grid.nx, block.ny * self.merge - grid.ny)
        squares = Kernel(self.merge, self.merge, after=margin).taps(*grid)
        return EncoderInput(
            (*grid, n_before),
            {
                PATCHES: np.ascontiguousarray(patches(pixels, self.patch)),
                POSITIONS: grid_positions(numbers // grid.nx, numbers % grid.nx),
                SQUARES: squares[: block.nx * block.ny],
                LAYOUT: block.layout(),
            },
        )

    def build(self, shape: tuple[int, ...]) -> Graph:
        nx, ny, n_before = shape
        grid = PatchGrid(nx, ny)
        block = self._block(grid, n_before)
        step = EncoderPass(self._transformer.norm_eps)
        x = self._transformer(step, self._patches(step, grid.n), rotate_halves(step, grid.n, _THETA))
        squares = step.input(SQUARES, self.merge**2 * block.nx * block.ny, type=TensorType.I32)
        x = self._projection(step, merge_by_channel(gather(x, squares), self.merge**2), "aligner")
        layout = step.input(LAYOUT, block.n, type=TensorType.I32)
        step.graph.output(EMBEDDINGS, get_rows(with_rows(x, *self._learned), layout))
        return step.graph
