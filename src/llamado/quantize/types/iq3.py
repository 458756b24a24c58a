"""IQ3_XXS and IQ3_S: points of four weights with eight magnitudes, plus signs (ggml-quants.c)."""

from __future__ import annotations

import numpy as np

from llamado.gguf.types import TensorType as T
from llamado.quantize.types.arithmetic import Bytes, Floats, blocks, f32, halves
from llamado.quantize.types.iq2 import error_weights, finish_groups, nibbles, shared_scale
from llamado.quantize.types.points import fit_points, signs

_TOP = 8  # magnitudes of a weight


def iq3_xxs(x: Floats, weights: Floats | None) -> Bytes:
    w = error_weights(x, weights, 2).reshape(-1, 32)
    left, sign = signs(x.reshape(-1, 32), w, even=True)
    most = left.max(1)
    empty = most < f32(1e-8)
    safe = np.where(empty, f32(1), most)
    numbers, scales = fit_points(T.IQ3_XXS, left, w, safe, safe / f32(2 * _TOP - 1), tries=15, step=0.2, again="off")
    scales, sign, numbers = finish_groups(empty, scales, sign, numbers, 127)
    d, levels = shared_scale(scales.reshape(-1, 8), 31, 15)
    packed = levels.reshape(-1).astype(np.uint32) << np.uint32(28)
    for k in range(4):
        packed |= sign[:, k].astype(np.uint32) << np.uint32(7 * k)
    numbers, packed = numbers.reshape(-1, 64), packed.reshape(-1, 8)
    packed[d == 0] = 0
    numbers[d == 0] = 0
    return blocks(
        halves(d * f32(1.0125)), numbers.astype(np.uint8), packed.astype("<u4").view(np.uint8).reshape(-1, 32)
    )


def iq3_s(x: Floats, weights: Floats | None) -> Bytes:
    w = error_weights(x, weights, 2).reshape(-1, 32)
    left, sign = signs(x.reshape(-1, 32), w, even=False)
    most = left.max(1)
    empty = most == 0
    safe = np.where(empty, f32(1), most)
    numbers, scales = fit_points(T.IQ3_S, left, w, safe, safe / f32(2 * _TOP - 1), tries=9, step=0.2, again="group")
    scales, sign, numbers = finish_groups(empty, scales, sign, numbers, 255)
    d, levels = shared_scale(scales.reshape(-1, 8), 31, 15)
    high = np.packbits((numbers >> 8).astype(np.uint8), axis=1, bitorder="little")
    return blocks(
        halves(d * f32(1.033)),
        numbers.astype(np.uint8).reshape(-1, 64),
        high.reshape(-1, 8),
        sign.astype(np.uint8).reshape(-1, 32),
        nibbles(levels),
    )
