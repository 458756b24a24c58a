"""Top-k selection and sampling of logits by machine code, many rows in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.jit import Jit
from llamado.devices.drawing import Drawing
from llamado.devices.kernels.selection import BLOCK, top_of_rows

MAX_K = 1024
"""Largest k."""
_N_ROWS = top_of_rows.fields.index("n_rows")

TopRow = tuple[NDArray[np.int32], NDArray[np.float32]]


class TopRows:
    """Selects the largest elements of rows of float32, for one caller at a time."""

    def __init__(self, jit: Jit) -> None:
        loaded = jit.load(top_of_rows)
        self._code = loaded.code
        # The call takes microseconds; a thread that gets the GIL meanwhile might keep it for longer.
        self._call = ctypes.PYFUNCTYPE(None, *[ctypes.c_int64] * 5)(loaded.address)
        self._fields = np.zeros(len(top_of_rows.fields), np.int64)
        self._size = (0, 0, 0)
        self._arrays: dict[str, NDArray[Any]] = {}

    def __call__(
        self, rows: Sequence[NDArray[np.float32]], ks: Sequence[int], drawings: Sequence[Drawing | None] = ()
    ) -> list[TopRow | int | None]:
        """For each row return its k largest elements, largest first and equal ones in row order, as (positions,
        values); with a drawing, return the position of the element that is drawn from them.

        The result is None for a row with a NaN or +inf. All rows have one length, and each k is from 1 to that length
        and at most MOST. Raises ValueError.
        """
        n_rows, most, n = len(rows), max(ks), len(rows[0])
        if not 0 < min(ks) <= most <= min(n, MAX_K):
            raise ValueError(f"the first {min(ks)} to {most} of {n} elements")
        if self._size[0] < n_rows or self._size[1] < most or self._size[2] != n:
            self._make_room(max(n_rows, self._size[0]), max(most, self._size[1]), n)
        arrays = self._arrays
        addresses, steps, us = arrays["rows"], arrays["drawings"], self._us
        for i, row in enumerate(rows):
            if row.dtype != np.float32 or row.shape != (n,) or row.strides != (4,):
                raise ValueError(f"a row of {row.dtype} {row.shape} that is no row of {n} float32")
            addresses[i] = row.__array_interface__["data"][0]
            drawing = drawings[i] if drawings else None
            if drawing is None:
                steps[i, 1] = -1
            else:
                steps[i, 0], steps[i, 1] = drawing.steps.__array_interface__["data"][0], len(drawing.steps)
                us[i] = drawing.u
        arrays["ks"][:n_rows] = ks
        self._fields[_N_ROWS] = n_rows
        self._call(self._address, 0, 1, 0, 0)
        sound, drawn = arrays["numbers"][:n_rows].tolist(), arrays["drawn"][:n_rows].tolist()
        found: list[TopRow | int | None] = []
        for i, k in enumerate(ks):
            if not sound[i]:
                found.append(None)
            elif drawings and drawings[i] is not None:
                found.append(drawn[i])
            else:
                found.append((arrays["places"][i, :k].copy(), arrays["values"][i, :k].copy()))
        return found

    def _make_room(self, n_rows: int, most: int, n: int) -> None:
        self._size = n_rows, most, n
        self._arrays = {
            "rows": np.empty(n_rows, np.int64),
            "ks": np.empty(n_rows, np.int64),
            "numbers": np.empty(n_rows, np.int64),
            "places": np.empty((n_rows, most), np.int32),
            "values": np.empty((n_rows, most), np.float32),
            "greatest": np.empty(-(-n // BLOCK), np.float32),
            "drawings": np.empty((n_rows, 3), np.int64),
            "logits": np.empty(2 * most, np.float64),
            "drawn": np.empty(n_rows, np.int64),
        }
        self._us = self._arrays["drawings"].view(np.float64)[:, 2]
        fields = {name: int(array.ctypes.data) for name, array in self._arrays.items()}
        self._fields[:] = top_of_rows.pack(fields | {"n": n, "n_rows": n_rows, "stride": most})
        self._address = int(self._fields.ctypes.data)
