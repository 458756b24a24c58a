"""What the families of types share: roundings as C has them, halves, and bits packed into bytes."""

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
    """The nearest integer, halves away from zero (C's roundf)."""
    return np.trunc(x + np.copysign(_HALF, x)).astype(np.int32)


def nearest(x: Floats) -> Ints:
    """The nearest integer, halves to even; beyond ±2²² what the low bits of a sum happen to be (`search.nearest`)."""
    found: Ints = (x + _ROUNDING).view(np.int32)
    found &= 0x7FFFFF
    found -= 0x400000
    return found


def inverse(d: Floats) -> Floats:
    """1 / d, 0 where d is 0."""
    return np.divide(f32(1), d, out=np.zeros_like(d), where=d != 0)


def halves(x: Floats) -> Bytes:
    """float16 bytes, uint8[n, 2] of float32[n]."""
    return np.ascontiguousarray(x, np.float32).astype("<f2").view(np.uint8).reshape(-1, 2)


def through_half(x: Floats) -> Floats:
    """What a reader finds where x was stored as float16."""
    return x.astype(np.float16).astype(np.float32)


def largest(x: Floats) -> Floats:
    """Each row's first element of greatest magnitude, with its sign."""
    found: Floats = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], 1)[:, 0]
    return found


def pairs(levels: NDArray[Any]) -> Bytes:
    """Two levels of four bits in a byte: element i and, above it, i + half of the row."""
    half = levels.shape[1] // 2
    low, high = levels[:, :half].astype(np.uint8), levels[:, half:].astype(np.uint8)
    return (low & 15) | (high << 4)


def top_bits(levels: NDArray[Any], bit: int) -> Bytes:
    """Bit `bit` of each level, eight to a byte, the first one lowest."""
    return np.packbits((levels.astype(np.uint8) >> bit) & 1, axis=1, bitorder="little")


def blocks(*parts: Bytes) -> Bytes:
    """Parts of blocks, each uint8[n, bytes], side by side."""
    return np.concatenate(parts, axis=1)
