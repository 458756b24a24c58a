"""A short kernel, and what it computes."""

from __future__ import annotations

import numpy as np

from llamado.devices.cpu.jit import Jit
from llamado.devices.kernels.rows import rows_kernel

STAGES = (("row",), ("scale",), ("unary", "RELU"), ("store",))
KERNEL = rows_kernel(STAGES)


def double(jit: Jit) -> None:
    """Runs the kernel: relu(2x + 1)."""
    x = np.array([-3, -0.5, 0, 1, 2, 3, 4, 5, 6, 7], np.float32)
    y, counter, scratch = np.zeros_like(x), np.zeros(8, np.int64), np.zeros(64, np.uint8)
    values: dict[str, int | float] = dict.fromkeys(KERNEL.fields, 0)
    values |= {"n": x.size, "n1": 1, "n2": 1, "n3": 1, "share": 1, "scratch": scratch.ctypes.data}
    values |= {"s0_x": x.ctypes.data, "s1_factor": 2.0, "s1_bias": 1.0, "s3_x": y.ctypes.data}
    fields = np.array(KERNEL.pack(values, int), np.int64)
    jit.function(KERNEL, stages=STAGES)(fields.ctypes.data, 0, 1, counter.ctypes.data, 8)
    assert y.tolist() == np.maximum(2 * x + 1, 0).tolist()
