"""Vision encoder of Step3-VL (clip.cpp, models/step3vl.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add
from llamado.gguf.types import TensorType
from llamado.media.chunks import Grid, Piece, PositionLayout, TokenText
from llamado.media.media import Media
from llamado.media.tiling import step3vl
from llamado.models.encoders.dynamic import DynamicEncoder, image_options
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.grids import PatchGrid, place_inputs
from llamado.models.encoders.parts.grid_convolution import Convolution, Kernel
from llamado.models.encoders.parts.interpolation import Interpolation, PositionTable
from llamado.models.encoders.parts.patches import ORDER, PatchEmbedding
from llamado.models.encoders.parts.rotation import rotate_2d
from llamado.models.encoders.parts.transformer import EncoderTransformer
from llamado.models.encoders.texts import PictureTexts
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear
from llamado.models.weights import Weights

_THETA = 10_000.0
_KERNEL = Kernel(3, stride=2, before=1, after=1)
_SHRINK = 4
TAPS = "taps_0", "taps_1"
"""Names of inputs: the rows that the two convolutions read."""

TEXTS = PictureTexts(
    overview_begin=(TokenText("<im_start>"),),
    overview_end=(TokenText("<im_end>"),),
    tile_begin=(TokenText("<patch_start>"),),
    tile_end=(TokenText("<patch_end>"),),
    row_end=(TokenText("<patch_newline>"),),
)


class Step3Encoder(DynamicEncoder):
    """Step3-VL: learned and rotary positions; two convolutions of stride 2 shrink the grid."""

    @property
    def required_tokens(self) -> list[TokenText]:
        return TEXTS.tokens

    def prepare(self, media: Media) -> list[Piece]:
        return TEXTS.arrange(step3vl(media, self.options), lambda image, part: self.chunk(media, image, part))

    def _take_weights(self, weights: Weights) -> None:
        keys, shared = self.keys, weights.shared
        self.take_sizes(1)
        edge = keys.int_("preproc_image_size", 0)
        self.options = replace(image_options(keys, 1), longest_edge=edge)
        if keys.int_("projector.scale_factor", _SHRINK) != _SHRINK:
            raise InvalidModel(f"'{keys.name('projector.scale_factor')}' is not {_SHRINK}")
        self._transformer = EncoderTransformer(keys, weights)
        n = self._transformer.n_embd
        self._patches = PatchEmbedding.take(weights, self.patch, n)
        side = isqrt(weights.ne("v.position_embd.weight")[1])
        table = shared.require("v.position_embd.weight", n, side * side)
        self._positions = PositionTable(table, side, side, Interpolation.BILINEAR_ANTIALIAS)
        first = Convolution.take(weights, "mm.0", _KERNEL.size, n)
        second = Convolution.take(weights, "mm.1", _KERNEL.size, first.n_out)
        self._convolutions = first, second
        self.n_embd = weights.ne("mm.model.fc.weight")[1]
        self._projection = Linear(shared.require("mm.model.fc.weight", second.n_out, self.n_embd))

    @property
    def unit(self) -> int:
        return self.patch * _SHRINK

    def n_tokens(self, grid: PatchGrid) -> int:
        return grid.n // _SHRINK**2

    def layout(self, grid: PatchGrid) -> PositionLayout:
        return Grid(grid.nx // _SHRINK, grid.ny // _SHRINK)

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        taps = {}
        nx, ny = grid
        for name in TAPS:
            taps[name] = _KERNEL.taps(nx, ny)
            nx, ny = _KERNEL.n_out(nx), _KERNEL.n_out(ny)
        return {**super().arrays(grid, order), ORDER: order, **self._positions.arrays(*grid), **taps}

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        rows, columns = place_inputs(step, grid.n)
        order = step.input(ORDER, grid.n, type=TensorType.I32)
        x = add(self._patches(step, grid.n), self._positions.rows(step, *grid, order), "pos_embed")
        x = self._transformer(step, x, rotate_2d(columns, rows, _THETA))
        n = grid.n
        for convolution, taps in zip(self._convolutions, TAPS, strict=True):
            n //= _KERNEL.stride**2
            x = convolution(step, x, taps, n, f"downsample-{taps}")
        step.graph.output(EMBEDDINGS, self._projection(step, x, "projector"))
        return step.graph
