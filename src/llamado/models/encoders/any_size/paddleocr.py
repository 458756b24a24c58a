"""PaddleOCR-VL and dots.ocr (clip.cpp, models/paddleocr.cpp and dotsocr.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add
from llamado.ggml.ops import UnaryOp
from llamado.gguf.types import TensorType
from llamado.media.chunks import Grid, PositionLayout
from llamado.models.encoders.dynamic import DynamicEncoder, image_options, limited_by_file
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.grids import PatchGrid
from llamado.models.encoders.parts.interpolation import Interpolation, PositionTable
from llamado.models.encoders.parts.patches import ORDER, PatchEmbedding
from llamado.models.encoders.parts.projection import Projection
from llamado.models.encoders.parts.rotation import POSITIONS, grid_positions, rotate_halves
from llamado.models.encoders.parts.rows import merge_rows
from llamado.models.encoders.parts.transformer import EncoderTransformer, NormKind, TransformerOptions
from llamado.models.errors import UnsupportedModel
from llamado.models.parts.norms import LayerNorm, RmsNorm
from llamado.models.weights import Weights

_THETA = 10_000.0


class PaddleOcrEncoder(DynamicEncoder):
    """PaddleOCR-VL: learned and rotary positions; squares of 2 × 2 normed patches are merged and projected."""

    texts = "<|IMAGE_START|>", "<|IMAGE_END|>"

    def _take_weights(self, weights: Weights) -> None:
        self.take_sizes(2)
        self.options = limited_by_file(self.keys, image_options(self.keys, self.merge))
        self._transformer = EncoderTransformer(self.keys, weights)
        n = self._transformer.n_embd
        activation = self._transformer.activation.value[0]
        assert activation is not None  # those of a file have one
        self._patches = PatchEmbedding.take(weights, self.patch, n)
        side = isqrt(weights.ne("v.position_embd.weight")[1])
        table = weights.shared.require("v.position_embd.weight", n, side * side)
        self._positions = PositionTable(table, side, side, Interpolation.BILINEAR_ANTIALIAS)
        self._norm = LayerNorm.take(weights.shared, "mm.input_norm", n)
        self._projection = Projection.take(weights.shared, "mm.1", "mm.2", n * self.merge**2, activation)
        self.n_embd = self._projection.n_out

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        positions = grid_positions(order // grid.nx, order % grid.nx)
        return {POSITIONS: positions, ORDER: order, **self._positions.arrays(*grid)}

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        order = step.input(ORDER, grid.n, type=TensorType.I32)
        x = add(self._patches(step, grid.n), self._positions.rows(step, *grid, order), "pos_embed")
        x = self._transformer(step, x, rotate_halves(step, grid.n, _THETA))
        x = merge_rows(self._norm(step.with_eps(1e-5), x, "input_norm"), self.merge**2)
        step.graph.output(EMBEDDINGS, self._projection(step, x, "projection"))
        return step.graph


class DotsOcrEncoder(DynamicEncoder):
    """dots.ocr: RMS norms and rotary positions; squares of normed patches are merged and projected."""

    texts = "<|img|>", "<|endofimg|>"
    merge_key: ClassVar[str] = "projector.scale_factor"

    def _transformer_options(self) -> TransformerOptions:
        """Return the options of the layers. Raises GgufError or InvalidModel."""
        return {"norm": NormKind.RMS}

    def _take_weights(self, weights: Weights) -> None:
        keys, shared = self.keys, weights.shared
        self.take_sizes(keys.int_(self.merge_key))
        if self.merge < 2:
            raise UnsupportedModel(f"'{keys.name(self.merge_key)}' is {self.merge}; 2 is expected")
        self.options = limited_by_file(keys, image_options(keys, self.merge))
        self._transformer = EncoderTransformer(keys, weights, **self._transformer_options())
        n = self._transformer.n_embd
        self._patches = PatchEmbedding.take(weights, self.patch, n)
        self._transformer.post_norm = RmsNorm(shared.require("mm.post_norm.weight", n))
        self._norm = LayerNorm.take(shared, "mm.input_norm", n)
        self._projection = Projection.take(shared, "mm.0", "mm.2", n * self.merge**2, UnaryOp.GELU_ERF)
        self.n_embd = self._projection.n_out

    def layout(self, grid: PatchGrid) -> PositionLayout:
        return Grid(self.n_tokens(grid), 1)

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        return {POSITIONS: grid_positions(order // grid.nx, order % grid.nx)}

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        x = self._transformer(step, self._patches(step, grid.n), rotate_halves(step, grid.n, _THETA))
        x = merge_rows(self._norm(step.with_eps(1e-6), x, "input_norm"), self.merge**2)
        step.graph.output(EMBEDDINGS, self._projection(step, x, "projection"))
        return step.graph
