"""Muse Glimmer's encoder (clip.cpp, models/muse-glimmer.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add, get_rows, mul_mat, unary
from llamado.ggml.ops import UnaryOp
from llamado.gguf.types import TensorType
from llamado.media.media import Media
from llamado.media.model_sizes import muse_glimmer
from llamado.media.preprocessing import PreparedPicture
from llamado.media.resize import Resize, ResizeFilter
from llamado.models.encoders.dynamic import DynamicEncoder, image_options, limited_by_tokens
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.grids import PatchGrid, place_inputs
from llamado.models.encoders.parts.interpolation import Interpolation, PositionTable
from llamado.models.encoders.parts.patches import ORDER, PatchEmbedding
from llamado.models.encoders.parts.rotation import rotate_2d
from llamado.models.encoders.parts.rows import merge_by_channel
from llamado.models.encoders.parts.transformer import Activation, EncoderTransformer
from llamado.models.encoders.parts.windows import window_order
from llamado.models.weights import Weights

_THETA = 10_000.0
_PERIOD = 4
"""Each fourth layer, and the last, have no windows."""
_MERGED = "merged"
"""Name of an input: the place of each patch among those of its token, in the order of windows."""


class MuseGlimmerEncoder(DynamicEncoder):
    """Muse Glimmer: learned and rotary positions, and attention in windows as large as the table of positions."""

    texts = "<|image_start|>", "<|image_end|>"

    def _take_weights(self, weights: Weights) -> None:
        self.take_sizes()
        keys, shared = self.keys, weights.shared
        options = image_options(keys, self.merge, Resize(ResizeFilter.LANCZOS))
        self.options = limited_by_tokens(keys, options, 1, 4096)
        self._transformer = EncoderTransformer(keys, weights, activation=Activation.GELU_ERF)
        n = self._transformer.n_embd
        self._patches = PatchEmbedding.take(weights, self.patch, n)
        self._side = isqrt(weights.ne("v.position_embd.weight")[1])
        table = shared.require("v.position_embd.weight", n, self._side**2)
        self._positions = PositionTable(table, self._side, self._side, Interpolation.BILINEAR)
        widths = [n * self.merge**2, *(weights.ne(f"mm.{i}.weight")[1] for i in range(3))]
        self._projection = [shared.require(f"mm.{i}.weight", *widths[i : i + 2]) for i in range(3)]
        self.n_embd = widths[-1]

    def preprocess(self, media: Media) -> PreparedPicture:
        return muse_glimmer(media, self.options)

    def order(self, grid: PatchGrid) -> NDArray[np.int32]:
        return window_order(*grid, self._side)[0]

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        place = np.empty_like(order)
        place[order] = np.arange(order.size, dtype=np.int32)
        return {
            **super().arrays(grid, order),
            ORDER: order,
            _MERGED: place[grid.order(self.merge)],
            **self._positions.arrays(*grid),
        }

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        rows, columns = place_inputs(step, grid.n)
        order, merged = (step.input(name, grid.n, type=TensorType.I32) for name in (ORDER, _MERGED))
        _, windows = window_order(*grid, self._side)
        last = len(self._transformer.layers) - 1
        x = add(self._patches(step, grid.n), self._positions.rows(step, *grid, order), "pos_embed")
        x = self._transformer(
            step,
            x,
            rotate_2d(columns, rows, _THETA),
            lambda layer: None if layer == last or not (layer + 1) % _PERIOD else windows,
        )
        x = merge_by_channel(get_rows(x, merged), self.merge**2)
        for i, weight in enumerate(self._projection):
            x = mul_mat(weight, unary(x, UnaryOp.GELU_ERF) if i else x, name=f"projection-{i}")
        step.graph.output(EMBEDDINGS, x)
        return step.graph
