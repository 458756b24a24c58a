"""Four-bit floats (E2M1): MXFP4 with a power-of-two scale, NVFP4 with an eight-bit float scale."""

from __future__ import annotations

import numpy as np

from llamado.quantize.types.arithmetic import Bytes, Floats, f32, pairs

_MIDDLES = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)
"""Midpoints of the doubled values 0, 1, 2, 3, 4, 6, 8 and 12; ties go to the smaller value."""


def mxfp4(x: Floats, _: Floats | None) -> Bytes:
    x = x.reshape(-1, 32)
    most = np.abs(x).max(axis=1)
    # floor(log2) of a float is its exponent; for subnormal numbers, that of the highest bit
    exponent = np.frexp(most)[1] - 1
    e = np.where(most > 0, exponent - 2 + 127, 0).astype(np.int32).astype(np.uint8)
    bits = np.where(e < 2, np.uint32(0x00200000) << e.astype(np.uint32), (e.astype(np.uint32) - 1) << 23)
    d = bits.astype(np.uint32).view(np.float32)  # half the scale of the exponent, because the values above are doubled
    return np.concatenate([e[:, None], pairs(_nearest_levels(x, d))], axis=1)


def nvfp4(x: Floats, _: Floats | None) -> Bytes:
    groups = x.reshape(-1, 16)
    e = _to_ue4m3(np.abs(groups).max(axis=1) / f32(6))
    levels = pairs(_nearest_levels(groups, _from_ue4m3(e)))
    return np.concatenate([e.reshape(-1, 4), levels.reshape(-1, 32)], axis=1)


def _nearest_levels(x: Floats, d: Floats) -> Bytes:
    """Return the index of the nearest value for each element; plus 8 if negative."""
    size = np.abs(x)
    levels = np.zeros(x.shape, np.uint8)
    for middle in _MIDDLES:
        levels += size > (f32(middle) * d)[:, None]
    levels[d == 0] = 0
    levels[(x < 0) & (levels > 0)] += 8
    return levels


def _to_ue4m3(x: Floats) -> Bytes:
    """Convert to unsigned floats with 4 exponent and 3 mantissa bits; halves round up."""
    x = np.minimum(x, f32(448))
    bits = x.view(np.uint32)
    exponent = ((bits >> 23) & 255).astype(np.int32) - 127 + 7
    mantissa = ((bits >> 20) & 7).astype(np.int32) + ((bits >> 19) & 1).astype(np.int32)
    exponent, mantissa = np.where(mantissa > 7, exponent + 1, exponent), np.where(mantissa > 7, 0, mantissa)
    normal = np.where(exponent >= 15, 0x7E, (exponent << 3) | mantissa)
    small = np.minimum((x * f32(512) + f32(0.5)).astype(np.int32), 7)
    is_small = ((bits >> 23) & 255).astype(np.int32) - 127 + 7 <= 0
    return np.where(x > 0, np.where(is_small, small, normal), 0).astype(np.uint8)


def _from_ue4m3(e: Bytes) -> Floats:
    """Return half the value of such floats."""
    exponent, mantissa = (e >> 3).astype(np.int32) & 15, (e & 7).astype(np.float32)
    raw = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(f32(1) + mantissa / f32(8), exponent - 7))
    found: Floats = np.where((e == 0) | (e == 0x7F), 0, raw).astype(np.float32) * f32(0.5)
    return found
