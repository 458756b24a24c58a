"""Blocks with one scale and optional minimum: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0; one and two bits: Q1_0, Q2_0.

Without importance, scales are computed from the extremes of a block (simple.py); with importance, they are searched
(ggml-quants.c).
"""

from __future__ import annotations

import numpy as np

from llamado.gguf.types import TensorType as T
from llamado.quantize.types import search, simple
from llamado.quantize.types.arithmetic import (
    Bytes,
    Floats,
    blocks,
    f32,
    halves,
    inverse,
    pairs,
    round_away,
    top_bits,
)


def q8_0(x: Floats, _: Floats | None) -> Bytes:
    return _quantize_rows(x, T.Q8_0)


def q4_0(x: Floats, weights: Floats | None) -> Bytes:
    if weights is None:
        return _quantize_rows(x, T.Q4_0)
    d, levels = _symmetric(x, weights, 8)
    return blocks(halves(d), pairs(levels))


def q5_0(x: Floats, weights: Floats | None) -> Bytes:
    if weights is None:
        return _quantize_rows(x, T.Q5_0)
    d, levels = _symmetric(x, weights, 16)
    return blocks(halves(d), top_bits(levels, 4), pairs(levels))


def q4_1(x: Floats, weights: Floats | None) -> Bytes:
    if weights is None:
        return _quantize_rows(x, T.Q4_1)
    d, least, levels = _from_least(x, weights, 15)
    return blocks(halves(d), halves(least), pairs(levels))


def q5_1(x: Floats, weights: Floats | None) -> Bytes:
    if weights is None:
        return _quantize_rows(x, T.Q5_1)
    d, least, levels = _from_least(x, weights, 31)
    return blocks(halves(d), halves(least), top_bits(levels, 4), pairs(levels))


def q1_0(x: Floats, _: Floats | None) -> Bytes:
    x = x.reshape(-1, 128)
    mean = np.add.accumulate(np.abs(x), axis=1)[:, -1] / f32(128)
    return blocks(halves(mean), np.packbits(x >= 0, axis=1, bitorder="little"))


def q2_0(x: Floats, _: Floats | None) -> Bytes:
    x = x.reshape(-1, 64)
    d = np.abs(x).max(axis=1)
    levels = np.clip(round_away(x * inverse(d)[:, None]) + 1, 0, 3).astype(np.uint8).reshape(-1, 16, 4)
    return blocks(halves(d), np.bitwise_or.reduce(levels << np.array([0, 2, 4, 6], np.uint8), axis=2))


def error_weights(x: Floats, weights: Floats) -> Floats:
    """Return the weight of an element's error: importance · √(mean square of its row + x²); float32[n, row]."""
    square = x * x
    mean = np.add.accumulate(square, axis=1)[:, -1] / f32(x.shape[1])
    return weights * np.sqrt(mean[:, None] + square)


def _quantize_rows(x: Floats, target: T) -> Bytes:
    rows = np.ascontiguousarray(x, np.float32).view(np.uint8)
    found, _ = simple.quantize_rows(rows, T.F32, x.shape[1], target)
    return found


def _symmetric(x: Floats, weights: Floats, peak: int) -> tuple[Floats, Bytes]:
    """Return scales, and levels 0 … 2·peak − 1, where `peak` stands for zero."""
    levels, d = search.fit_scale(x.reshape(-1, 32), error_weights(x, weights).reshape(-1, 32), peak)
    return d, levels


def _from_least(x: Floats, weights: Floats, peak: int) -> tuple[Floats, Floats, Bytes]:
    """Return scales, minima, and levels 0 … `peak` above the minimum."""
    levels, d, least = search.fit_scale_and_min(
        x.reshape(-1, 32), error_weights(x, weights).reshape(-1, 32), peak, -0.9, 0.05, 36,
        absolute=False, bounded=True,
    )  # fmt: skip
    return d, -least, levels
