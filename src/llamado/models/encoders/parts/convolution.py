"""Convolutions over a grid of rows, which a graph computes from shifted copies of the grid."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import add, cast, concat, cont, fill, get_rows, mul, reshape, transpose, view_1d, view_2d
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

SIDE = 3
N_TAPS = SIDE * SIDE


def taps(nx: int, ny: int, stride: int = 1) -> NDArray[np.int32]:
    """Return the row of a grid of `nx` · `ny` under each weight of a 3 × 3 kernel, for each place of the kernel, with a
    border of one cell: int32 [9, n_places]. Cells of the border have the number nx · ny.
    """
    padded = np.full((ny + 2, nx + 2), nx * ny, np.int32)
    padded[1:-1, 1:-1] = np.arange(nx * ny, dtype=np.int32).reshape(ny, nx)
    places = np.lib.stride_tricks.sliding_window_view(padded, (SIDE, SIDE))[::stride, ::stride]
    return np.ascontiguousarray(places.reshape(-1, N_TAPS).T)


def convolve_each(x: Tensor, weight: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """Convolve each channel of `x`, F32 [n_channels, n_cells], with its own kernel: F32 [n_channels, n_places].

    `weight` is [3, 3, 1, n_channels], `ids` the result of `taps`: I32 [n_places, 9].
    """
    n, n_places = x.ne[0], ids.ne[0]
    kernels = cont(transpose(reshape(cast(weight, TensorType.F32), N_TAPS, n)))
    border = fill(cont(view_2d(x, n, 1, x.nb[1])), 0.0)
    cells = concat(x, border, 1)
    total: Tensor | None = None
    for tap in range(N_TAPS):
        rows = get_rows(cells, view_1d(ids, n_places, tap * ids.nb[1]))
        part = mul(rows, view_1d(kernels, n, tap * kernels.nb[1]))
        total = part if total is None else add(total, part, name)
    assert total is not None
    return total
