"""Products of one to many columns, few enough to be run on an emulated machine, too (`tests/arm.sh`): a column has the
same bits in any company, and with `--bits` on any machine.
"""

from __future__ import annotations

import numpy as np
import pytest
from running import Array, Case, new, values, weight_bytes

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.kernels.activations import quantized_bytes
from llamado.devices.kernels.matmul import matmul_few
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T

# each kind of zero point, minimum, scale and table, and the other weights that are in no model of test_lowerings.py
TYPES = (T.Q3_K, T.Q2_K, T.NVFP4, T.IQ4_XS, T.Q1_0, T.IQ1_S)


def multiply(device: CpuDevice, type: T, raw: Array, n: int, x: Array) -> Array:
    """Columns x [matrices, columns, n] times as many matrices of 19 rows."""
    w, b = new(n, 19, len(x), type=type), new(n, x.shape[1], len(x))
    return Case({"y": g.mul_mat(w, b)}, {w: raw, b: x}).run(device)["y"][0]


@pytest.mark.full
@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_columns_alone_and_among_others(best: CpuDevice, type: T) -> None:
    n = 512
    raw, x = weight_bytes(type, n, 19), values(n, 31, 1)
    alone = multiply(best, type, raw, n, x[:, :1])
    for columns in (2, 3, 4, 13, 22, 31) if type != T.IQ1_S else (4, 13):
        found = multiply(best, type, raw, n, x[:, :columns])
        assert found[:, :1].tobytes() == alone.tobytes(), columns
        last = multiply(best, type, raw, n, x[:, columns - 1 : columns])
        assert found[:, -1:].tobytes() == last.tobytes(), columns


@pytest.mark.parametrize("type", [T.Q4_0, T.Q4_K], ids=lambda type: type.name)
def test_columns_that_lie_apart(best: CpuDevice, type: T) -> None:
    """The columns belong to several matrices."""
    n = 256
    raw, x = weight_bytes(type, n, 3 * 19), values(n, 13, 3)
    alone = multiply(best, type, raw, n, x[:, :1])
    for columns in (3, 13):
        assert multiply(best, type, raw, n, x[:, :columns])[:, :1].tobytes() == alone.tobytes(), columns


@pytest.mark.parametrize("columns", [18, 20, 31])
def test_padding_columns_are_not_written(best: CpuDevice, columns: int) -> None:
    """Sums of columns that there are not, in a kernel for more of them."""
    n, rows, most = 64, 16, 32
    w, share = weight_bytes(T.Q4_1, n, rows), np.zeros(16, np.int64)
    x = np.zeros(quantized_bytes(32, n, most, best.jit.lowering.columns), np.uint8)
    y = np.full((most, rows), 7.0, np.float32)
    fields = dict.fromkeys(matmul_few.fields, 0) | {"w": w.ctypes.data, "x": x.ctypes.data, "y": y.ctypes.data}
    fields |= {"row_bytes": w.size // rows, "n_blocks": n // 32, "n_rows": rows, "share": 1}
    fields |= {"n_columns": columns, "y_stride": 4 * rows}
    packed = np.array(matmul_few.pack(fields), np.int64)
    parameters = {"weights": "Q4_1", "columns": -(-columns // 4) * 4, "near": False, "panel_rows": 8}
    best.jit.function(matmul_few, **parameters)(packed.ctypes.data, 0, 1, share.ctypes.data, 8)
    assert (y[:columns] == 0).all() and (y[columns:] == 7).all()
