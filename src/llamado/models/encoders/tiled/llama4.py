"""Llama 4: tiles of one size, rotary positions of rows and columns, squares of patches joined to rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import gelu, rope_ext
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput
from llamado.media.resize import Size
from llamado.media.tiling import square_resolutions
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.patches import ORDER
from llamado.models.encoders.pictures import Pixels, join
from llamado.models.encoders.texts import PictureTexts
from llamado.models.encoders.tiled.internvl import ClassEncoder
from llamado.models.weights import Weights

COLUMNS, ROWS = "columns", "rows"
"""Names of inputs: the column and row of each patch, counted from 1; 0 for the class embedding."""
FREQ_BASE = 10000.0
MOST_TILES = 3
"""Tiles of a side."""


class Llama4Encoder(ClassEncoder):
    """A picture is an overview, and tiles if it is large.

    Tokens follow one another column by column, as in llama.cpp (clip_graph_llama4).
    """

    texts = PictureTexts(begin="<|image_start|>", end="<|image_end|>")

    def _resolutions(self) -> tuple[Size, ...]:
        return (*super()._resolutions(), *square_resolutions(self.keys.int_("image_size"), MOST_TILES))

    def order(self, nx: int, ny: int) -> NDArray[np.int32]:
        by_rows = super().order(nx, ny).reshape(ny // self.merge, nx // self.merge, -1)
        return by_rows.transpose(1, 0, 2).reshape(-1)

    def _take_projector(self, weights: Weights) -> None:
        super()._take_projector(weights)
        n_in = self.transformer.n_embd * self.merge**2
        names = ("mm.model.mlp.1", "mm.model.mlp.2", "mm.model.fc")
        widths = [weights.ne(f"{name}.weight")[1] for name in names]
        self._first, self._second, self._third = (
            weights.shared.require(f"{name}.weight", n, width)
            for name, n, width in zip(names, [n_in, *widths], widths, strict=False)
        )
        self.n_embd = widths[-1]

    def input(self, pixels: Pixels) -> EncoderInput:
        given = super().input(pixels)
        nx = pixels.shape[1] // self.patch
        order = given.arrays[ORDER][:-1]
        rows, columns = (np.append(at + np.int32(1), np.int32(0)) for at in divmod(order, np.int32(nx)))
        return EncoderInput(given.shape, {**given.arrays, ROWS: rows, COLUMNS: columns})

    def encode_positions(self, step: EncoderPass, x: Tensor) -> Tensor:
        columns, rows = (step.input(name, x.ne[1], type=TensorType.I32) for name in (COLUMNS, ROWS))
        return self.transformer(step, x, lambda heads: rotate_by_grid(heads, columns, rows))

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = gelu(step.mul_mat(self._first, join(x, self.merge**2, "pixel_shuffle"), "adapter_1"))
        x = gelu(step.mul_mat(self._second, x, "adapter_2"))
        return step.mul_mat(self._third, x, "projected")


def rotate_by_grid(heads: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Rotate the first half of each head by the positions `first`, the second half by `second` (build_rope_2d)."""
    half = heads.ne[0] // 2
    for at, positions in enumerate((first, second)):
        heads = rope_ext(heads, positions, None, half, 0, 0, FREQ_BASE, 1, 0, 1, 0, 0, offset=at * half)
    return heads
