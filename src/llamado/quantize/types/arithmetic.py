"""Arithmetic shared by the type families: C rounding, float16, and bit packing."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.floating[Any]]"  # float32
Bytes: TypeAlias = "NDArray[np.integer[Any]]"  # uint8
Ints: TypeAlias = "NDArray[np.integer[Any]]"  # int32

_HALF = np.nextafter(np.float32(0.5), np.float32(0))
_ROUNDING = np.float32(12582912.0)


def f32(number: float) -> np.float32:
    return np.float32(number)


def round_away(x: Floats) -> Ints:
    """Round to the nearest integer, halves away from zero (C's roundf)."""
    return np.trunc(x + np.copysign(_HALF, x)).astype(np.int32)


def nearest(x: Floats) -> Ints:
    """Round to the nearest integer, halves to even; beyond ±2²² the result is undefined (see `search.nearest`)."""
    found: Ints = (x + _ROUNDING).view(np.int32)
    found &= 0x7FFFFF
    found -= 0x400000
    return found


def inverse(d: Floats) -> Floats:
    """Return 1 / d, or 0 if d is 0."""
    return np.divide(f32(1), d, out=np.zeros_like(d), where=d != 0)


def halves(x: Floats) -> Bytes:
    """Convert float32[n] to float16 bytes, uint8[n, 2]."""
    return np.ascontiguousarray(x, np.float32).astype("<f2").view(np.uint8).reshape(-1, 2)


def through_half(x: Floats) -> Floats:
    """Round x to float16 and back."""
    return x.astype(np.float16).astype(np.float32)


def largest(x: Floats) -> Floats:
    """Return each row's first element of greatest magnitude, with its sign."""
    found: Floats = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], 1)[:, 0]
    return found


def pairs(levels: NDArray[Any]) -> Bytes:
    """Pack two 4-bit levels per byte: element i low, element i + half of the row high."""
    half = levels.shape[1] // 2
    low, high = levels[:, :half].astype(np.uint8), levels[:, half:].astype(np.uint8)
    return (low & 15) | (high << 4)


def top_bits(levels: NDArray[Any], bit: int) -> Bytes:
    """Pack bit `bit` of each level, eight per byte, the first one lowest."""
    return np.packbits((levels.astype(np.uint8) >> bit) & 1, axis=1, bitorder="little")


def blocks(*parts: Bytes) -> Bytes:
    """Concatenate parts of blocks, each uint8[n, bytes]."""
    return np.concatenate(parts, axis=1)
