"""Rotary positions in two dimensions: one half of each head turns by the row of a patch, the other by its column."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import rope_ext
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.transformer import Rotate

POSITIONS = "positions"
"""Name of the input with the positions for `rotate_halves`."""


def rotate_2d(
    first: Tensor,
    second: Tensor,
    base: float,
    *,
    interleaved: bool = False,
    mode: RopeMode = RopeMode.NORMAL,
) -> Rotate:
    """Return the rotation of the first half of each head by the positions `first`, of the second by `second`.

    Both halves have the same frequencies, or if `interleaved` those with even and with odd numbers (build_rope_2d).
    """

    def rotate(x: Tensor) -> Tensor:
        half = x.ne[0] // 2
        factor = base ** (-2 / x.ne[0]) if interleaved else 1.0
        x = rope_ext(x, first, None, half, mode, 0, base, 1.0, 0.0, 1.0, 0.0, 0.0)
        return rope_ext(x, second, None, half, mode, 0, base, factor, 0.0, 1.0, 0.0, 0.0, offset=half)

    return rotate


def grid_positions(rows: NDArray[np.int32], columns: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the array of POSITIONS for patches in these rows and columns: int32 [4 · n]."""
    return np.concatenate([rows, columns, rows, columns]).astype(np.int32)


def rotate_halves(step: EncoderPass, n: int, base: float, name: str = POSITIONS) -> Rotate:
    """Return the rotation of `n` patches in which element i of the first half of a head pairs with element i of the
    second. The first half of the pairs turns by the row, the second by the column, with the same frequencies (ggml's
    VISION mode).
    """
    positions = step.input(name, 4 * n, type=TensorType.I32)

    def rotate(x: Tensor) -> Tensor:
        quarter = x.ne[0] // 4
        return rope_ext(
            x, positions, None, x.ne[0] // 2, RopeMode.VISION, 32768, base, 1.0, 0.0, 1.0, 32.0, 1.0,
            sections=(quarter, quarter, quarter, quarter),
        )  # fmt: skip

    return rotate
