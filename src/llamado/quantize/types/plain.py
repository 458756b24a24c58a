"""Unquantized weights: F32, F16, BF16."""

from __future__ import annotations

import numpy as np

from llamado.quantize.types.arithmetic import Bytes, Floats


def f32(x: Floats, _: Floats | None) -> Bytes:
    return np.ascontiguousarray(x, "<f4").view(np.uint8).reshape(-1, 4)


def f16(x: Floats, _: Floats | None) -> Bytes:
    with np.errstate(over="ignore"):
        return x.astype("<f2").view(np.uint8).reshape(-1, 2)


def bf16(x: Floats, _: Floats | None) -> Bytes:
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2").view(np.uint8).reshape(-1, 2)
