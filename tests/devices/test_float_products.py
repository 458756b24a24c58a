"""Products of plain floats: right, and the same bits for few columns as for many, with any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from running import Case, check, new, values

from llamado.devices.cpu.device import CpuDevice
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T

# Elements of a row, rows, columns: short of and past a stretch of columns or of rows, and shapes of the simple kernel.
SHAPES = [(64, 12, 33), (384, 16, 200), (1032, 8, 60), (1536, 20, 40), (100, 12, 40), (64, 10, 40)]


@pytest.mark.parametrize("type", [T.F32, T.F16, T.BF16])
@pytest.mark.parametrize(("n", "n_rows", "n_columns"), SHAPES)
def test_many_columns(best: CpuDevice, type: T, n: int, n_rows: int, n_columns: int) -> None:
    w, x = new(n, n_rows, type=type, name="w"), new(n, n_columns, name="x")
    weights = values(n, n_rows)
    data = (weights.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1) if type is T.BF16 else weights
    found = check(best, g.mul_mat(w, x), {w: data, x: values(n, n_columns, seed=1)}, rtol=1e-4, atol=1e-5)
    few = new(n, 2, name="x")
    for first in range(0, n_columns, 17):
        two = values(n, n_columns, seed=1)[first : first + 2]
        if len(two) == 2:
            w = new(n, n_rows, type=type, name="w")
            part = Case({"y": g.mul_mat(w, few)}, {w: data, few: two}).run(best)["y"]
            assert part[0, 0].tobytes() == found[0, 0, first : first + 2].tobytes()
            few = new(n, 2, name="x")


def test_threads_and_matrices(teams: list[CpuDevice]) -> None:
    w, x = new(72, 8, 2, type=T.F16, name="w"), new(72, 50, 4, name="x")
    data = {w: values(72, 8, 2), x: values(72, 50, 4, seed=1)}
    found = [check(device, g.mul_mat(w, x), data, rtol=1e-4, atol=1e-5) for device in teams]
    assert len({one.tobytes() for one in found}) == 1
