"""K-quants: super-blocks of 256 weights in groups of 16 or 32 with scales of few bits, Q2_K to Q6_K (ggml-quants.c)."""

from __future__ import annotations

import numpy as np

from llamado.quantize.types import search
from llamado.quantize.types.arithmetic import Bytes, Floats, blocks, f32, halves, nearest, pairs, through_half


def q2_k(x: Floats, weights: Floats | None) -> Bytes:
    groups = x.reshape(-1, 16)
    n = len(groups) // 16
    if weights is None:
        levels, scales, mins = search.fit_scale_and_min(
            groups, np.abs(groups), 3, -0.5, 0.1, 15, absolute=True, bounded=False
        )
        d, ls = _shared_scale(scales.reshape(n, 16), 15, bound=False)
        dmin, lm = _shared_scale(mins.reshape(n, 16), 15, bound=False)
    else:
        w = _error_weights(x, weights, 1).reshape(-1, 16)
        levels, scales, mins = search.fit_scale_and_min(groups, w, 3, -0.9, 0.05, 36, absolute=False, bounded=True)
        sums = search.group_sums(w, squares=False).reshape(n, 16)
        ls, d = search.fit_positive(scales.reshape(n, 16), sums, 15)
        lm, dmin = search.fit_positive(mins.reshape(n, 16), sums, 15)
    packed = ls | (lm << 4)
    _requantize(groups, levels, d, packed & 15, 0, 3, 0, dmin, packed >> 4)
    return blocks(packed, _quarters(levels.reshape(n, 256)), halves(d), halves(dmin))


def q3_k(x: Floats, weights: Floats | None) -> Bytes:
    groups = x.reshape(-1, 16)
    n = len(groups) // 16
    if weights is None:
        levels, scales = search.fit_scale_by_turns(groups, 4)
        scales = scales.reshape(n, 16)
        most = _first_largest(scales)
        with np.errstate(divide="ignore", invalid="ignore"):
            iscale = f32(-32) / most
            d = np.where(most != 0, f32(1) / iscale, f32(0))
            rounded = np.clip(nearest(iscale[:, None] * scales).astype(np.int8), -32, 31) + 32
        ls: Bytes = np.where(most[:, None] != 0, rounded, 0).astype(np.uint8)
    else:
        w = _error_weights(x, weights, 2).reshape(-1, 16)
        levels, scales = search.fit_scale(groups, w, 4)
        ls, d = search.fit_scale(scales.reshape(n, 16), search.group_sums(w, squares=False).reshape(n, 16), 32)
    high = (ls >> 4).reshape(n, 4, 4)
    packed = blocks(
        (ls[:, :8] & 15) | ((ls[:, 8:] & 15) << 4),
        high[:, 0] | (high[:, 1] << 2) | (high[:, 2] << 4) | (high[:, 3] << 6),
    )
    _requantize(groups, levels, d, ls.astype(np.int8) - np.int8(32), -4, 3, 4)
    levels = levels.reshape(n, 256)
    mask = np.packbits((levels > 3).reshape(n, 8, 32).swapaxes(1, 2), axis=2, bitorder="little")[:, :, 0]
    return blocks(mask, _quarters(levels & 3), packed, halves(d))


def q4_k(x: Floats, weights: Floats | None) -> Bytes:
    d, dmin, packed, levels = _with_mins(x, weights, 15, -1.0, 20)
    return blocks(halves(d), halves(dmin), packed, pairs(levels.reshape(-1, 64)).reshape(-1, 128))


def q5_k(x: Floats, weights: Floats | None) -> Bytes:
    d, dmin, packed, levels = _with_mins(x, weights, 31, -0.5, 15)
    n = len(levels)
    high = np.packbits((levels > 15).reshape(n, 8, 32).swapaxes(1, 2), axis=2, bitorder="little")[:, :, 0]
    return blocks(halves(d), halves(dmin), packed, high, pairs(levels.reshape(-1, 64)).reshape(-1, 128))


def q6_k(x: Floats, weights: Floats | None) -> Bytes:
    groups = x.reshape(-1, 16)
    n = len(groups) // 16
    w = None if weights is None else np.broadcast_to(weights, x.shape).reshape(-1, 16)
    levels, scales = search.fit_scale(groups, w, 32)
    scales = scales.reshape(n, 16)
    most = _first_largest(scales)
    nothing = np.abs(most) < f32(search.NOTHING)
    with np.errstate(divide="ignore", invalid="ignore"):
        iscale = np.where(nothing, f32(0), f32(-128) / most)
        d = np.where(nothing, f32(0), f32(1) / iscale)
    ls = np.minimum(nearest(iscale[:, None] * scales), 127).astype(np.int8)
    _requantize(groups, levels, d, ls, -32, 31, 32)
    levels = levels.reshape(n, 256)
    levels[nothing] = 0
    quarters = levels.reshape(n, 2, 4, 32)
    low = (quarters[:, :, :2] & 15) | ((quarters[:, :, 2:] & 15) << 4)
    return blocks(low.reshape(n, 128), _quarters(levels >> 4), ls.view(np.uint8), halves(d))


def _with_mins(
    x: Floats, weights: Floats | None, peak: int, low: float, steps: int
) -> tuple[Floats, Floats, Bytes, Bytes]:
    """Return scale, scale of the minima, packed scales and minima of eight groups, and all levels, uint8[n, 256]."""
    groups = x.reshape(-1, 32)
    n = len(groups) // 8
    if weights is None:
        mean = np.sqrt(search.group_sums(groups, squares=True) / f32(32))
        w = mean[:, None] + np.abs(groups)
        levels, scales, mins = search.fit_scale_and_min(groups, w, peak, low, 0.1, steps, absolute=False, bounded=False)
        d, ls = _shared_scale(scales.reshape(n, 8), 63, bound=True)
        dmin, lm = _shared_scale(mins.reshape(n, 8), 63, bound=True)
    else:
        w = _error_weights(x, weights, 2).reshape(-1, 32)
        levels, scales, mins = search.fit_scale_and_min(groups, w, peak, -0.9, 0.05, 36, absolute=False, bounded=True)
        sums = search.group_sums(w, squares=False).reshape(n, 8)
        ls, d = search.fit_positive(scales.reshape(n, 8), sums, 63)
        lm, dmin = search.fit_positive(mins.reshape(n, 8), sums, 63)
    packed = blocks(
        ls[:, :4] | ((ls[:, 4:] >> 4) << 6),
        lm[:, :4] | ((lm[:, 4:] >> 4) << 6),
        (ls[:, 4:] & 15) | ((lm[:, 4:] & 15) << 4),
    )
    _requantize(groups, levels, d, ls & 63, 0, peak, 0, dmin, lm & 63)
    return d, dmin, packed, levels.reshape(n, 256)


def _error_weights(x: Floats, weights: Floats, twice: int) -> Floats:
    """Return importance · √(`twice` · mean square of the super-block + x²), float32[rows, row]."""
    sigma2 = f32(twice) * search_squares(x) / f32(256)
    supers = x.reshape(-1, 256)
    root = np.sqrt(sigma2[:, None] + supers * supers)
    found: Floats = weights * root.reshape(x.shape)
    return found


def search_squares(x: Floats) -> Floats:
    """Return the sums of squares of super-blocks, added in order."""
    return search.group_sums(x.reshape(-1, 256), squares=True)


def _shared_scale(scales: Floats, peak: int, *, bound: bool) -> tuple[Floats, Bytes]:
    """Return one scale per super-block, from the largest of its scales, and their levels 0 … `peak`."""
    most = np.maximum(scales.max(axis=1), f32(0))
    iscale = np.divide(f32(peak), most, out=np.zeros_like(most), where=most > 0)
    levels = nearest(iscale[:, None] * scales).astype(np.uint8)
    if bound:
        levels = np.minimum(levels, np.uint8(peak))
    return most / f32(peak), levels


def _first_largest(scales: Floats) -> Floats:
    found: Floats = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], 1)[:, 0]
    return found


def _requantize(
    groups: Floats,
    levels: Bytes,
    d: Floats,
    scales: np.ndarray,
    low: int,
    high: int,
    zero: int,
    dmin: Floats | None = None,
    mins: Bytes | None = None,
) -> None:
    """Recompute levels for the rounded scales that a reader uses; groups with scale 0 keep theirs."""
    scale = (through_half(d)[:, None] * scales.astype(np.float32)).reshape(-1)
    some = scale != 0
    moved = groups
    if dmin is not None and mins is not None:
        moved = groups + (through_half(dmin)[:, None] * mins.astype(np.float32)).reshape(-1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        new = nearest(moved / scale[:, None])
    np.clip(new, low, high, out=new)
    new += zero
    np.copyto(levels, new.astype(np.uint8), where=some[:, None])


def _quarters(levels: Bytes) -> Bytes:
    """Pack four 2-bit levels per byte: each half of a super-block is divided into quarters, lowest bits first."""
    q = levels.reshape(len(levels), 2, 4, 32)
    return (q[:, :, 0] | (q[:, :, 1] << 2) | (q[:, :, 2] << 4) | (q[:, :, 3] << 6)).reshape(len(levels), 64)
