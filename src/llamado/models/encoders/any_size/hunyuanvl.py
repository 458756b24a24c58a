"""Hunyuan-VL's encoder, and the positions of its tokens (clip.cpp, models/hunyuanvl.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add, concat, gelu, mul_mat, repeat, reshape
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import PositionLayout
from llamado.media.resize import PadStyle, Resize, ResizeFilter
from llamado.models.encoders.dynamic import DynamicEncoder, image_options, limited_by_tokens
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.grids import PatchGrid
from llamado.models.encoders.parts.interpolation import Interpolation, PositionTable
from llamado.models.encoders.parts.patches import ORDER, PatchEmbedding
from llamado.models.encoders.parts.rows import as_f32, merge_by_channel
from llamado.models.encoders.parts.transformer import Activation, EncoderTransformer
from llamado.models.weights import Weights


class HunyuanGrid(NamedTuple):
    """Positions of a picture: a beginning, `ny` rows of `nx` tokens and a line end each, and an end.

    `n_before` is the number of pictures before it in the prompt. The first position counts tokens. The others are
    column, row and `n_before`, except at the beginning and the end.
    """

    nx: int
    ny: int
    n_before: int = 0

    def behind(self, n_pictures: int) -> HunyuanGrid:
        """Return the positions if there are `n_pictures` before this one in the prompt."""
        return self._replace(n_before=n_pictures)

    @property
    def n_positions(self) -> int:
        """Return how far the positions of the tokens behind the picture move on: by all of its tokens."""
        return (self.nx + 1) * self.ny + 2

    def positions(self, first: int) -> NDArray[np.int32]:
        """Return the positions of each token, for a picture at position `first`: int32 [4, n]."""
        n = self.n_positions
        found = np.repeat(np.arange(first, first + n, dtype=np.int32)[None], 4, axis=0)
        rows, columns = np.divmod(np.arange(n - 2, dtype=np.int32), np.int32(self.nx + 1))
        found[1, 1:-1], found[2, 1:-1], found[3, 1:-1] = columns, rows, self.n_before
        return found


class HunyuanVlEncoder(DynamicEncoder):
    """Hunyuan-VL: learned positions; two convolutions merge squares of patches, and learned embeddings are added."""

    texts = "<｜hy_place▁holder▁no▁100｜>", "<｜hy_place▁holder▁no▁101｜>"

    def _take_weights(self, weights: Weights) -> None:
        self.take_sizes()
        self._take_limits()
        keys, shared = self.keys, weights.shared
        self._transformer = EncoderTransformer(keys, weights, activation=Activation.GELU)
        n = self._transformer.n_embd
        self._patches = PatchEmbedding.take(weights, self.patch, n)
        side = isqrt(weights.ne("v.position_embd.weight")[1])
        table = shared.require("v.position_embd.weight", n, side * side)
        self._positions = PositionTable(table, side, side, Interpolation.BILINEAR_WIDER)
        n_between, n_merged = (weights.ne(f"mm.{i}.weight")[3] for i in (0, 2))
        self.n_embd = weights.ne("mm.model.fc.weight")[1]
        self._pre_norm = shared.require("mm.pre_norm.weight", n)
        self._first = shared.require("mm.0.weight", self.merge, self.merge, n, n_between)
        self._first_bias = shared.require("mm.0.bias", n_between)
        self._second = shared.require("mm.2.weight", 1, 1, n_between, n_merged)
        self._second_bias = shared.require("mm.2.bias", n_merged)
        self._line_end = shared.require("v.image_newline", n_merged)
        self._projection = shared.linear("mm.model.fc", n_merged, self.n_embd)
        self._ends = tuple(shared.require(f"mm.image_{which}", self.n_embd) for which in ("begin", "end"))
        self._post_norm = shared.require("mm.post_norm.weight", self.n_embd)

    def _take_limits(self) -> None:
        """Read the options of preprocessing; the limits of pixels in the file go before those of tokens.

        Raises GgufError or InvalidModel.
        """
        keys = self.keys
        options = image_options(keys, self.merge, Resize(ResizeFilter.LANCZOS, PadStyle.NONE))
        options = limited_by_tokens(keys, options, 256, 16_384)
        self.options = replace(
            options,
            min_pixels=keys.int_("image_min_pixels", options.min_pixels),
            max_pixels=keys.int_("image_max_pixels", options.max_pixels),
        )

    def n_tokens(self, grid: PatchGrid) -> int:
        return self.layout(grid).n_positions

    def layout(self, grid: PatchGrid) -> PositionLayout:
        return HunyuanGrid(grid.nx // self.merge, grid.ny // self.merge)

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        return {ORDER: order, **self._positions.arrays(*grid)}

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        order = step.input(ORDER, grid.n, type=TensorType.I32)
        x = add(self._patches(step, grid.n), self._positions.rows(step, *grid, order), "pos_embed")
        x = step.norm(self._transformer(step, x), self._pre_norm, "pre_norm")
        merged = merge_by_channel(x, self.merge**2)
        x = mul_mat(reshape(self._first, merged.ne[0], self._first.ne[3]), merged, name="conv1")
        x = gelu(add(x, self._first_bias))
        x = add(mul_mat(reshape(self._second, *self._second.ne[2:]), x, name="conv2"), self._second_bias)
        x = self._projection(step, self._with_line_ends(x, grid), "fc")
        begin, end = (reshape(as_f32(row), self.n_embd, 1) for row in self._ends)
        x = step.norm(concat(concat(begin, x, 1), end, 1), self._post_norm, "post_norm")
        step.graph.output(EMBEDDINGS, x)
        return step.graph

    def _with_line_ends(self, x: Tensor, grid: PatchGrid) -> Tensor:
        """Return the embeddings with that of a line end behind each row of tokens."""
        nx, ny = grid.nx // self.merge, grid.ny // self.merge
        n = x.ne[0]
        ends = repeat(reshape(as_f32(self._line_end), n, 1, 1), n, 1, ny)
        return reshape(concat(reshape(x, n, nx, ny), ends, 1), n, (nx + 1) * ny)
