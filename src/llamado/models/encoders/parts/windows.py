"""Attention in windows of a grid: groups of equal windows are computed as batches, without a mask.

Cells are ordered by window, and windows by size: at most four sizes occur, inside the grid and at its right and lower
edges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import concat, view_4d
from llamado.ggml.tensor import Tensor


class Windows(NamedTuple):
    """Windows of consecutive positions: for each of the `groups`, the number of windows and of positions in each."""

    groups: tuple[tuple[int, int], ...]

    def of(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys or values, [head_dim, heads, n_positions], as [head_dim, heads, n, n_windows] for each
        group.
        """
        found, first = [], 0
        for count, n in self.groups:
            found.append(view_4d(x, x.ne[0], x.ne[1], n, count, x.nb[1], x.nb[2], n * x.nb[2], first * x.nb[2]))
            first += count * n
        return found


def join(parts: list[Tensor]) -> Tensor:
    """Return the rows of all groups, one behind the other. Pairs are joined first: few rows are copied often then."""
    while len(parts) > 1:
        pairs = [concat(a, b, 1) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def window_order(nx: int, ny: int, side: int) -> tuple[NDArray[np.int32], Windows]:
    """Return the numbers of the cells of a grid (row by row) in the order of windows of `side` × `side` cells, and the
    windows, in cells.
    """
    rows, columns = np.divmod(np.arange(nx * ny, dtype=np.int32), np.int32(nx))
    window = rows // side * -(-nx // side) + columns // side
    is_lower, is_right = rows >= ny // side * side, columns >= nx // side * side
    size = 2 * is_lower + is_right
    order = np.lexsort((window, size)).astype(np.int32)
    groups = []
    for which in range(4):
        n_cells = int((size == which).sum())
        if n_cells:
            n = (ny % side if which & 2 else side) * (nx % side if which & 1 else side)
            groups.append((n_cells // n, n))
    return order, Windows(tuple(groups))
