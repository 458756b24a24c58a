"""Scale search for IQ4_NL's non-linear levels (ggml-quants.c)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from llamado.devices.kernel import kernel
from llamado.devices.simd import F32, Code, Value, Work
from llamado.quantize.types.arithmetic import Floats
from llamado.quantize.types.search import LANES, NOTHING, F32xN, call, largest_lanes, padded, side_by_side

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MIDDLES = (np.array(LEVELS[:-1], np.float32) + np.array(LEVELS[1:], np.float32)) / np.float32(2)
"""From here on a number is nearer to the next level."""
_TRIES = 7


@kernel("x", "weights", "scales", "n")
def scale_of_levels(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Kernel: fit x ≈ scale · LEVELS[…] in groups of 32 by weighted squared errors.

    Scales that map the largest element to −127 ± 7 are tried, each improved by linear regression.
    """
    size = 32
    with c.range(0, a.n) as group:
        xs = side_by_side(c, a.x + group * (4 * LANES * size), size)
        ws = side_by_side(c, a.weights + group * (4 * LANES * size), size)
        most, magnitude = largest_lanes(c, xs, size)
        zero = c.const(F32xN, 0.0)

        def level(v: Value) -> Value:
            found = c.const(F32xN, float(LEVELS[0]))
            for middle, value in zip(MIDDLES.tolist(), LEVELS[1:], strict=True):
                found = c.select(v >= middle, c.const(F32xN, float(value)), found)
            return found

        def regress(iscale: Value) -> tuple[Value, Value]:
            sum_qx = sum_q2 = zero
            for i in range(size):
                x, w = c.load(F32xN, xs + 64 * i), c.load(F32xN, ws + 64 * i)
                q = level(iscale * x)
                sum_qx, sum_q2 = sum_qx + w * q * x, sum_q2 + w * q * q
            return sum_qx, sum_q2

        d = -most / float(LEVELS[0])
        sum_qx, sum_q2 = regress(c.const(F32xN, 1.0) / d)
        scale = c.var(c.select(sum_q2 > 0.0, sum_qx / sum_q2, zero))
        best = c.var(scale.value * sum_qx)
        with c.range(-_TRIES, _TRIES + 1) as s:
            sum_qx, sum_q2 = regress((s.to(F32) + float(LEVELS[0])).splat(LANES) / most)
            better = (sum_q2 > 0.0) & (sum_qx * sum_qx > best.value * sum_q2)
            scale.value = c.select(better, sum_qx / sum_q2, scale.value)
            best.value = c.select(better, scale.value * sum_qx, best.value)
        c.store(a.scales + group * (4 * LANES), c.select(magnitude < NOTHING, zero, scale.value))


def fit_levels(x: Floats, weights: Floats) -> Floats:
    """Return the scales of groups of 32: float32[n]."""
    groups, weights = padded(x), padded(weights)
    scales = np.empty(len(groups), np.float32)
    call(scale_of_levels, {"x": groups, "weights": weights, "scales": scales, "n": len(groups) // LANES})
    return scales[: len(x)]
