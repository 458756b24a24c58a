"""Weights whose bits are the same everywhere, with the odd rows that searches trip over."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def noise(n: int, seed: int) -> NDArray[np.float32]:
    """Bell-shaped numbers about ±0.1 large, made of a generator's integers alone."""
    raw = np.random.PCG64(seed).random_raw(3 * n) >> np.uint64(40)
    parts: NDArray[np.float32] = (raw.astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)).reshape(3, n)
    return (parts[0] + parts[1] + parts[2]) * np.float32(0.125)


def odd_rows(n: int = 768) -> NDArray[np.float32]:
    """float32[16, n]: plain rows, and zeros, equal, sparse, tiny, huge, one-sided, ternary and half-precision ones."""
    x = noise(16 * n, 3).reshape(16, n)
    x[1] = 0
    x[2, :256] = 0.5
    x[3, ::7] = 0
    x[4] *= np.float32(1e-20)
    x[5] = np.abs(x[5])
    x[6] = -np.abs(x[6])
    x[7, :300] = -0.25
    x[8] = x[8].astype(np.float16)
    x[9] *= np.float32(1e4)
    x[10, :32] = np.arange(32) - 16
    x[12, :64] = np.abs(x[12, :64])
    x[12, 8:40:4] = -0.0
    x[12, 9:40:4] = 0.0
    x[11] = np.sign(x[11]) * (np.abs(x[11]) > 0.05) * np.float32(0.03)
    return x


def importance(n: int = 768) -> NDArray[np.float32]:
    """Return the importance of each column, over four orders of magnitude."""
    return (noise(n, 5) * np.float32(4)) ** 4 + np.float32(1e-6)
