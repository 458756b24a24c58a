"""IQ2_XXS, IQ2_XS and IQ2_S: points of eight weights with three magnitudes, plus signs (ggml-quants.c)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.gguf.types import TensorType as T
from llamado.quantize.types import search
from llamado.quantize.types.arithmetic import Bytes, Floats, Ints, blocks, f32, halves, nearest
from llamado.quantize.types.points import fit_points, signs

_TOP = 3  # magnitudes of a weight


def iq2_xxs(x: Floats, weights: Floats | None) -> Bytes:
    w = error_weights(x, weights, 1).reshape(-1, 32)
    left, sign = signs(x.reshape(-1, 32), w, even=True)
    _, start = search.fit_positive(left, w, _TOP + 1)
    most = start * f32(_TOP)
    empty = (np.maximum(left.max(1), left[:, 0]) < f32(search.NOTHING)) | (most <= 0)
    numbers, scales = fit_points(
        T.IQ2_XXS, left, w, np.where(empty, f32(1), most), start, tries=6, step=0.1, again="all"
    )
    scales, sign, numbers = finish_groups(empty, scales, sign, numbers, 127)
    d, levels = shared_scale(scales.reshape(-1, 8), 31, 15)
    packed = sign[:, 0].astype(np.uint32)
    for k in range(1, 4):
        packed |= sign[:, k].astype(np.uint32) << np.uint32(7 * k)
    packed |= levels.reshape(-1).astype(np.uint32) << np.uint32(28)
    low = np.ascontiguousarray(numbers.astype(np.uint8)).view("<u4")[:, 0]
    words = np.stack([low, packed], axis=1).astype("<u4")
    words.reshape(-1, 8, 2)[d == 0] = 0
    return blocks(halves(d), words.view(np.uint8).reshape(-1, 64))


def iq2_xs(x: Floats, weights: Floats | None) -> Bytes:
    w = error_weights(x, weights, 1).reshape(-1, 16)
    left, sign = signs(x.reshape(-1, 16), w, even=True)
    numbers, scales, sign = _fit_sixteens(T.IQ2_XS, left, w, sign, search.NOTHING, 127)
    d, levels = shared_scale(scales.reshape(-1, 16), 31, 15)
    words = (numbers.astype(np.uint16) | (sign.astype(np.uint16) << np.uint16(9))).reshape(-1, 32)
    words[d == 0] = 0
    return blocks(halves(d), words.astype("<u2").view(np.uint8).reshape(-1, 64), nibbles(levels))


def iq2_s(x: Floats, weights: Floats | None) -> Bytes:
    if weights is None:
        supers = x.reshape(-1, 256)
        sigma2 = f32(2) * search.group_sums(supers, squares=True) / f32(256)
        w: Floats = (f32(0.25) * sigma2[:, None] + supers * supers).reshape(-1, 16)
    else:
        w = error_weights(x, weights, 2).reshape(-1, 16)
    left, sign = signs(x.reshape(-1, 16), w, even=False)
    numbers, scales, sign = _fit_sixteens(T.IQ2_S, left, w, sign, 1e-8, 255)
    d, levels = shared_scale(scales.reshape(-1, 16), 31, 15)
    numbers = numbers.reshape(-1, 32)
    high = (numbers >> 8).reshape(-1, 8, 4) << np.array([0, 2, 4, 6])
    return blocks(
        halves(d * f32(0.9875)),
        numbers.astype(np.uint8),
        sign.astype(np.uint8).reshape(-1, 32),
        np.bitwise_or.reduce(high, axis=2).astype(np.uint8),
        nibbles(levels),
    )


def error_weights(x: Floats, weights: Floats | None, twice: int) -> Floats:
    """Return the weight of an element's error: importance · √(`twice` · mean square of its super-block + x²)."""
    supers = x.reshape(-1, 256)
    if weights is None:
        return supers * supers
    sigma2 = f32(twice) * search.group_sums(supers, squares=True) / f32(256)
    found: Floats = weights * np.sqrt(sigma2[:, None] + supers * supers).reshape(x.shape)
    return found


def finish_groups(
    empty: NDArray[np.bool_], scales: Floats, sign: Ints, numbers: Ints, mask: int
) -> tuple[Floats, Ints, Ints]:
    """Zero empty groups, and make scales positive by flipping signs."""
    flipped = scales < 0
    sign = np.where(flipped[:, None], ~sign, sign) & mask
    keep = ~empty[:, None]
    return np.where(empty, f32(0), np.abs(scales)), sign * keep, numbers * keep


def _fit_sixteens(
    type_: T, left: Floats, w: Floats, sign: Ints, nothing: float, mask: int
) -> tuple[Ints, Floats, Ints]:
    most = left.max(1)
    empty = most < f32(nothing)
    safe = np.where(empty, f32(1), most)
    numbers, scales = fit_points(type_, left, w, safe, safe / f32(2 * _TOP - 1), tries=9, step=0.1, again="off")
    scales, sign, numbers = finish_groups(empty, scales, sign, numbers, mask)
    return numbers, scales, sign


def shared_scale(scales: Floats, steps: int, peak: int) -> tuple[Floats, Ints]:
    """Return one scale per super-block, and levels of its scales.

    A level l = 0 … `peak` stands for (2l + 1) / `steps` of the largest scale.
    """
    d = scales.max(axis=1) / f32(steps)
    inverse = np.divide(f32(1), d, out=np.zeros_like(d), where=d != 0)
    levels = np.clip(nearest(f32(0.5) * (inverse[:, None] * scales - f32(1))), 0, peak)
    levels[d == 0] = 0
    return d, levels


def nibbles(levels: Ints) -> Bytes:
    """Pack two adjacent 4-bit levels per byte."""
    return (levels[:, ::2] | (levels[:, 1::2] << 4)).astype(np.uint8)
