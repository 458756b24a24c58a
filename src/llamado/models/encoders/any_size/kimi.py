"""MoonViT (arXiv 2504.07491), the encoder of Kimi-VL and Kimi K2.5 (clip.cpp, models/kimivl.cpp and kimik25.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add
from llamado.gguf.types import TensorType
from llamado.media.chunks import Piece
from llamado.media.media import Media
from llamado.media.preprocessing import ImageOptions
from llamado.models.encoders.dynamic import DynamicEncoder, image_options, limited_by_file, limited_by_tokens
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.grids import PatchGrid, place_inputs
from llamado.models.encoders.parts.interpolation import Interpolation, PositionTable
from llamado.models.encoders.parts.patches import ORDER, PatchEmbedding
from llamado.models.encoders.parts.projection import Projection
from llamado.models.encoders.parts.rotation import rotate_2d
from llamado.models.encoders.parts.rows import merge_rows
from llamado.models.encoders.parts.transformer import EncoderTransformer
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import Weights

_THETA = 10_000.0
_GLM_TEXTS = "<|begin_of_image|>", "<|end_of_image|>"


class KimiVlEncoder(DynamicEncoder):
    """Kimi-VL: learned and rotary positions; squares of patches are normed, merged and projected."""

    texts = "<|media_start|>", "<|media_end|>"
    has_rows = False
    interpolation: ClassVar[Interpolation] = Interpolation.BILINEAR_ANTIALIAS

    def _take_weights(self, weights: Weights) -> None:
        keys, shared = self.keys, weights.shared
        self.take_sizes(keys.int_("projector.scale_factor", 1))
        self.options = self._read_options()
        self._transformer = EncoderTransformer(keys, weights)
        n = self._transformer.n_embd
        self._patches = PatchEmbedding.take(weights, self.patch, n)
        self._positions = self._take_positions(weights, n)
        self._norm = LayerNorm.take(shared, "mm.input_norm", n)
        self._projection = Projection.take(shared, "mm.1", "mm.2", n * self.merge**2)
        self.n_embd = self._projection.n_out

    def _take_positions(self, weights: Weights, n: int) -> PositionTable:
        """Take the table of learned positions, of a square. Raises InvalidModel."""
        side = isqrt(weights.ne("v.position_embd.weight")[1])
        table = weights.shared.require("v.position_embd.weight", n, side * side)
        return PositionTable(table, side, side, self.interpolation)

    @property
    def _projector_eps(self) -> float:
        """Epsilon of the projector's norm."""
        return 1e-5

    def _read_options(self) -> ImageOptions:
        """Read the options of preprocessing. Raises GgufError or InvalidModel."""
        return limited_by_tokens(self.keys, image_options(self.keys, self.merge), 8, 1024)

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        return {**super().arrays(grid, order), ORDER: order, **self._positions.arrays(*grid)}

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        rows, columns = place_inputs(step, grid.n)
        order = step.input(ORDER, grid.n, type=TensorType.I32)
        x = add(self._patches(step, grid.n), self._positions.rows(step, *grid, order), "pos_embed")
        x = self._transformer(step, x, rotate_2d(columns, rows, _THETA))
        x = merge_rows(self._norm(step.with_eps(self._projector_eps), x, "input_norm"), self.merge**2)
        step.graph.output(EMBEDDINGS, self._projection(step, x, "projection"))
        return step.graph


class KimiK25Encoder(KimiVlEncoder):
    """Kimi K2.5 and GLM 5.2: as Kimi-VL, with a table of positions that has columns and rows."""

    texts = "<|media_begin|>", "<|media_end|>"
    interpolation = Interpolation.BICUBIC

    def _read_options(self) -> ImageOptions:
        keys, options = self.keys, image_options(self.keys, self.merge)
        if all(keys.int_(f"image_{which}_pixels", 0) for which in ("min", "max")):
            return limited_by_file(keys, options)
        return limited_by_tokens(keys, options, 2, 4096)

    def prepare(self, media: Media) -> list[Piece]:
        before, chunk, behind = super().prepare(media)
        if self.keys.has_token(_GLM_TEXTS[0]):
            before, behind = _GLM_TEXTS
        return [before, chunk, behind]

    def _take_positions(self, weights: Weights, n: int) -> PositionTable:
        nx, ny = weights.ne("v.position_embd.weight")[1:3]
        table = weights.shared.require("v.position_embd.weight", n, nx, ny)
        return PositionTable(table, nx, ny, self.interpolation)

    @property
    def _projector_eps(self) -> float:
        return self._transformer.norm_eps
