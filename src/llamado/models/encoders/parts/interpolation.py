"""Learned positions of a grid, interpolated to grids of other sizes (ggml_interpolate).

Every kind of interpolation is separable. The host makes two small matrices of weights, for columns and rows, and the
graph multiplies the table by them.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import cast, cont, get_rows, mul_mat, permute, reshape
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.encoders.encoder import EncoderPass

X_WEIGHTS, Y_WEIGHTS = "x_weights", "y_weights"
"""Names of inputs: weights of the columns and of the rows of a table."""
_CUBIC = -0.75


class Interpolation(Enum):
    """Kind of interpolation between samples at the centers of pixels, except BILINEAR_CORNERS.

    BILINEAR_CORNERS: the first and last samples stay in the corners. BILINEAR_WIDER: the result is 0.1 samples wider
    than it is (Hunyuan-VL).
    """

    BILINEAR = "bilinear"
    BILINEAR_ANTIALIAS = "bilinear, antialiased"
    BILINEAR_CORNERS = "bilinear, corners aligned"
    BILINEAR_WIDER = "bilinear, wider"
    BICUBIC = "bicubic"

    def weights(self, n_in: int, n_out: int) -> NDArray[np.float32]:
        """Return the weight of each of `n_in` samples in each of `n_out`: float32 [n_out, n_in]."""
        width = np.float32(n_out)
        if self is Interpolation.BILINEAR_WIDER:
            width += np.float32(0.1)
        factor, offset = width / np.float32(n_in), np.float32(0.5)
        if self is Interpolation.BILINEAR_CORNERS:
            offset = np.float32(0)
            if n_out > 1 and n_in > 1:
                factor = np.float32(n_out - 1) / np.float32(n_in - 1)
        at = (np.arange(n_out, dtype=np.float32) + offset) / factor
        found = np.zeros((n_out, n_in), np.float32)
        if self is Interpolation.BILINEAR_ANTIALIAS:
            reach = max(np.float32(1), 1 / factor)
            distance = np.abs(np.arange(n_in, dtype=np.float32)[None] + np.float32(0.5) - at[:, None]) / reach
            found = np.maximum(np.float32(1) - distance, np.float32(0))
            found /= found.sum(axis=1, keepdims=True)
            return found
        at -= offset
        first = np.floor(at).astype(np.int64)
        if self is not Interpolation.BICUBIC:
            low, high = np.clip(first, 0, n_in - 1), np.clip(first + 1, 0, n_in - 1)
            part = np.clip(at - low.astype(np.float32), 0, 1)
            taps = [(low, 1 - part), (high, part)]
        else:
            part = at - first.astype(np.float32)
            factors = _far(part + 1), _near(part), _near(1 - part), _far(2 - part)
            taps = [(np.clip(first + i - 1, 0, n_in - 1), factor) for i, factor in enumerate(factors)]
        for sample, weight in taps:
            np.add.at(found, (np.arange(n_out), sample), weight)
        return found


def _near(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weight of samples at a distance of up to 1 (cubic convolution, as PyTorch has it)."""
    return ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1


def _far(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weight of samples at a distance of 1 to 2."""
    return ((_CUBIC * x - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC


class PositionTable(NamedTuple):
    """A table of learned positions of a grid of `nx` × `ny` patches, row by row: [n_embd, nx · ny]."""

    table: Tensor
    nx: int
    ny: int
    kind: Interpolation

    def arrays(self, nx: int, ny: int) -> dict[str, NDArray[np.float32]]:
        """Return the arrays of the inputs for another grid."""
        if self._is_as_it_is(nx, ny):
            return {}
        return {X_WEIGHTS: self.kind.weights(self.nx, nx), Y_WEIGHTS: self.kind.weights(self.ny, ny)}

    def of_grid(self, step: EncoderPass, nx: int, ny: int) -> Tensor:
        """Return the table of another grid, row by row: F32 [n_embd, nx · ny]."""
        table = self.table
        n = table.ne[0]
        if self._is_as_it_is(nx, ny):
            return reshape(table, n, nx * ny)
        if table.type is not TensorType.F32:
            table = cast(table, TensorType.F32)
        samples = cont(permute(reshape(table, n, self.nx, self.ny), 1, 0, 2, 3))
        columns = mul_mat(step.input(X_WEIGHTS, self.nx, nx), samples)  # [nx, n, self.ny]
        rows = mul_mat(step.input(Y_WEIGHTS, self.ny, ny), cont(permute(columns, 2, 1, 0, 3)))  # [ny, n, nx]
        return reshape(cont(permute(rows, 2, 0, 1, 3)), n, nx * ny)

    def rows(self, step: EncoderPass, nx: int, ny: int, order: Tensor) -> Tensor:
        """Return the positions of the patches of a grid in the given order: F32 [n_embd, n]."""
        return get_rows(self.of_grid(step, nx, ny), order)

    def _is_as_it_is(self, nx: int, ny: int) -> bool:
        """Return True if a grid has the table's own positions."""
        return (nx, ny) == (self.nx, self.ny) and self.kind is not Interpolation.BILINEAR_WIDER
