"""Four-bit non-linear levels: IQ4_NL with a scale per block, IQ4_XS with a scale per super-block (ggml-quants.c)."""

from __future__ import annotations

import numpy as np

from llamado.quantize.types import search
from llamado.quantize.types.arithmetic import Bytes, Floats, blocks, f32, halves, inverse, largest, nearest, pairs
from llamado.quantize.types.levels import MIDDLES, fit_levels


def iq4_nl(x: Floats, weights: Floats | None) -> Bytes:
    groups = x.reshape(-1, 32)
    d = fit_levels(groups, _error_weights(x, weights, 32))
    levels = _levels(groups * inverse(d)[:, None])
    return blocks(halves(d), pairs(levels))


def iq4_xs(x: Floats, weights: Floats | None) -> Bytes:
    groups = x.reshape(-1, 32)
    n = len(groups) // 8
    scales = fit_levels(groups, _error_weights(x, weights, 256)).reshape(n, 8)
    d = -largest(scales) / f32(32)
    ls = np.clip(nearest(inverse(d)[:, None] * scales), -32, 31)
    scale = (d[:, None] * ls.astype(np.float32)).reshape(-1)
    levels = _levels(groups * inverse(scale)[:, None])
    ls = (ls + 32).astype(np.uint16)
    high = np.bitwise_or.reduce((ls >> 4) << (2 * np.arange(8, dtype=np.uint16)), axis=1)
    low = (ls[:, ::2] & 15 | ((ls[:, 1::2] & 15) << 4)).astype(np.uint8)
    return blocks(halves(d), high.astype("<u2").view(np.uint8).reshape(-1, 2), low, pairs(levels).reshape(n, 128))


def _levels(x: Floats) -> Bytes:
    """Return the indices of the nearest levels."""
    return np.searchsorted(MIDDLES, x, side="right").astype(np.uint8)


def _error_weights(x: Floats, weights: Floats | None, block: int) -> Floats:
    """Return the weight of an element's error: x², or importance · √(twice the mean square of the block + x²)."""
    if weights is None:
        return (x * x).reshape(-1, 32)
    sigma2 = search.group_sums(x.reshape(-1, block), squares=True) * f32(2 / block)
    parts = x.reshape(-1, block)
    root = np.sqrt(sigma2[:, None] + parts * parts)
    found: Floats = (weights * root.reshape(x.shape)).reshape(-1, 32)
    return found
