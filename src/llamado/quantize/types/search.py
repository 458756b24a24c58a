"""Searches for scale, minimum and levels of small groups of weights with the least error.

They replicate llama.cpp's (ggml-quants.c) byte for byte: every sum runs over a group in order, in float32, with each
operation rounded separately. Sixteen groups are side by side in the lanes of a vector, so the order within a group
costs nothing. Differences between groups are handled by masks.

Arrays: groups are float32[n, size], their levels uint8[n, size].
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.jit import Jit
from llamado.devices.kernel import Kernel, kernel
from llamado.devices.simd import F32, Code, Type, Value, Work
from llamado.quantize.types.arithmetic import Bytes, Floats

LANES = 16
F32xN, I32xN, I8xN = Type("f32", LANES), Type("i32", LANES), Type("i8", LANES)
NOTHING = 1e-15
"""Groups whose weights are smaller than this become zeros (GROUP_MAX_EPS)."""
_ROUNDING = 12582912.0  # 1.5 · 2²³: adding it leaves the nearest integer in the low bits of the sum


def nearest(c: Code, v: Value) -> Value:
    """Round to the nearest integer, ties to even, as int32; beyond ±2²² the low bits of the sum are returned."""
    whole = v.type._replace(elem="i32")
    return ((v + _ROUNDING).bits(whole) & 0x7FFFFF) - 0x400000


def clamp(c: Code, l: Value, low: int, high: int) -> Value:  # noqa: E741
    return c.max(c.min(l, high), low)


def side_by_side(c: Code, address: Value, size: int) -> Value:
    """Transpose sixteen consecutive groups at `address` to scratch, with element i of all groups at 64·i."""
    to = c.scratch(4 * LANES * size)
    for k in range(0, size, 8):
        halves = []
        for half in range(0, LANES, 8):
            rows = [c.load(F32._replace(lanes=8), address + (half + r) * size * 4 + k * 4) for r in range(8)]
            halves.append(c.transpose8(rows))
        for i, (a, b) in enumerate(zip(*halves, strict=True)):
            c.store(to + 64 * (k + i), c.concat(a, b))
    return to


def _store_levels(c: Code, address: Value, i: int, level: Value) -> None:
    c.store(address + LANES * i, level.to(I8xN))


@kernel("x", "y", "n")
def sums(c: Code, a: SimpleNamespace, work: Work, *, size: int, squares: bool) -> None:
    """Kernel: y = the sum of each group's elements, or of their squares."""
    with c.range(0, a.n) as group:
        xs = side_by_side(c, a.x + group * (4 * LANES * size), size)
        total = c.var(c.const(F32xN, 0.0))
        for i in range(size):
            x = c.load(F32xN, xs + 64 * i)
            total.value = total.value + (x * x if squares else x)
        c.store(a.y + group * (4 * LANES), total.value)


@kernel("x", "weights", "levels", "scales", "mins", "n")
def scale_and_min(
    c: Code,
    a: SimpleNamespace,
    work: Work,
    *,
    size: int,
    peak: int,
    low: float,
    step: float,
    steps: int,
    absolute: bool,
    bounded: bool,
) -> None:
    """Kernel: fit x ≈ scale · level − min, levels 0 … `peak`, min ≥ 0, by weighted squared (or `absolute`) errors.

    Tries the scales (peak + low + step · s) / (max − min), s = 0 … `steps`, each improved by linear regression
    (make_qkx2_quants; `bounded`: make_qkx3_quants, which bounds the value before rounding).
    """
    with c.range(0, a.n) as group:
        xs = side_by_side(c, a.x + group * (4 * LANES * size), size)
        ws = side_by_side(c, a.weights + group * (4 * LANES * size), size)
        held = c.scratch(4 * LANES * size)
        x, w = c.load(F32xN, xs), c.load(F32xN, ws)
        least, most, sum_w, sum_x = x, x, w, w * x
        for i in range(1, size):
            x, w = c.load(F32xN, xs + 64 * i), c.load(F32xN, ws + 64 * i)
            least, most = c.min(x, least), c.max(x, most)
            sum_w, sum_x = sum_w + w, sum_x + w * x
        zero = c.const(F32xN, 0.0)
        least = c.select(least > 0.0, zero, least)
        flat = most.equals(least)

        def level(x: Value, iscale: Value, least: Value, first: bool) -> Value:
            v = iscale * (x - least)
            if bounded and not first:
                return c.select(v > 0.0, nearest(c, c.min(v, float(peak))), c.const(I32xN, 0))
            return clamp(c, nearest(c, v), 0, peak)

        def error(scale: Value, least: Value) -> Value:
            total = zero
            for i in range(size):
                diff = scale * c.load(F32xN, held + 64 * i) + least - c.load(F32xN, xs + 64 * i)
                diff = c.abs(diff) if absolute else diff * diff
                total = total + c.load(F32xN, ws + 64 * i) * diff
            return total

        span = most - least
        iscale = c.const(F32xN, float(peak)) / span
        scale = c.const(F32xN, 1.0) / iscale
        for i in range(size):
            l = level(c.load(F32xN, xs + 64 * i), iscale, least, True)  # noqa: E741
            c.store(held + 64 * i, l.to(F32xN))
        best = c.var(error(scale, least))
        best_scale, best_min = c.var(scale), c.var(least)
        # the parameters of the best levels
        best_iscale, from_min = c.var(iscale), c.var(least)
        is_first = c.var(c.const(Type("i32", LANES), 1))
        with c.range(0, steps + 1) as s:
            before = best_min.value
            first = c.f32(low) + c.f32(step) * s.to(F32) + float(peak)
            iscale = first.splat(LANES) / (most - before)
            sum_l = sum_l2 = sum_xl = zero
            for i in range(size):
                x, w = c.load(F32xN, xs + 64 * i), c.load(F32xN, ws + 64 * i)
                l = level(x, iscale, before, False).to(F32xN)  # noqa: E741
                c.store(held + 64 * i, l)
                wl = w * l
                sum_l, sum_l2, sum_xl = sum_l + wl, sum_l2 + wl * l, sum_xl + wl * x
            d = sum_w * sum_l2 - sum_l * sum_l
            this_scale = (sum_w * sum_xl - sum_x * sum_l) / d
            this_min = (sum_l2 * sum_x - sum_l * sum_xl) / d
            above = this_min > 0.0
            this_scale = c.select(above, sum_xl / sum_l2, this_scale)
            this_min = c.select(above, zero, this_min)
            found = error(this_scale, this_min)
            better = (d > 0.0) & (found < best.value)
            for var, value in (
                (best, found),
                (best_scale, this_scale),
                (best_min, this_min),
                (best_iscale, iscale),
                (from_min, before),
                (is_first, c.const(I32xN, 0)),
            ):
                var.value = c.select(better, value, var.value)
        to = a.levels + group * (LANES * size)
        for i in range(size):
            x = c.load(F32xN, xs + 64 * i)
            l = level(x, best_iscale.value, from_min.value, False)  # noqa: E741
            if bounded:
                l = c.select(  # noqa: E741
                    is_first.value.equals(1), level(x, best_iscale.value, from_min.value, True), l
                )
            _store_levels(c, to, i, c.select(flat, c.const(I32xN, 0), l))
        c.store(a.scales + group * (4 * LANES), c.select(flat, zero, best_scale.value))
        c.store(a.mins + group * (4 * LANES), -c.select(flat, least, best_min.value))


def largest_lanes(c: Code, xs: Value, size: int) -> tuple[Value, Value]:
    """Return the first element of greatest magnitude, with its sign, and the magnitude."""
    zero = c.const(F32xN, 0.0)
    most, magnitude = zero, zero
    for i in range(size):
        x = c.load(F32xN, xs + 64 * i)
        size_ = c.abs(x)
        greater = size_ > magnitude
        most, magnitude = c.select(greater, x, most), c.select(greater, size_, magnitude)
    return most, magnitude


@kernel("x", "weights", "levels", "scales", "n")
def scale_only(c: Code, a: SimpleNamespace, work: Work, *, size: int, peak: int, weighted: bool) -> None:
    """Kernel: fit x ≈ scale · (level − peak), levels 0 … 2·peak − 1, by weighted squared errors; unweighted: times x².

    Tries −(peak + s/10) / max, s = −9 … 9, each improved by linear regression (make_qx_quants).
    """
    with c.range(0, a.n) as group:
        xs = side_by_side(c, a.x + group * (4 * LANES * size), size)
        ws = side_by_side(c, a.weights + group * (4 * LANES * size), size) if weighted else xs
        most, magnitude = largest_lanes(c, xs, size)
        nothing = magnitude < NOTHING
        zero = c.const(F32xN, 0.0)

        def regress(iscale: Value) -> tuple[Value, Value]:
            sum_lx = sum_l2 = zero
            for i in range(size):
                x = c.load(F32xN, xs + 64 * i)
                w = c.load(F32xN, ws + 64 * i) if weighted else x * x
                l = clamp(c, nearest(c, iscale * x), -peak, peak - 1).to(F32xN)  # noqa: E741
                sum_lx, sum_l2 = sum_lx + w * x * l, sum_l2 + w * l * l
            return sum_lx, sum_l2

        iscale = c.const(F32xN, float(-peak)) / most
        sum_lx, sum_l2 = regress(iscale)
        scale = c.var(c.select(sum_l2.equals(0.0), zero, sum_lx / sum_l2))
        best, best_iscale = c.var(scale.value * sum_lx), c.var(iscale)
        with c.range(-9, 10) as s:
            iscale = -(c.f32(0.1) * s.to(F32) + float(peak)).splat(LANES) / most
            sum_lx, sum_l2 = regress(iscale)
            better = (sum_l2 > 0.0) & (sum_lx * sum_lx > best.value * sum_l2) & s.differs(0).splat(LANES)
            scale.value = c.select(better, sum_lx / sum_l2, scale.value)
            best.value = c.select(better, scale.value * sum_lx, best.value)
            best_iscale.value = c.select(better, iscale, best_iscale.value)
        to = a.levels + group * (LANES * size)
        for i in range(size):
            l = clamp(c, nearest(c, best_iscale.value * c.load(F32xN, xs + 64 * i)), -peak, peak - 1)  # noqa: E741
            _store_levels(c, to, i, c.select(nothing, c.const(I32xN, 0), l + peak))
        c.store(a.scales + group * (4 * LANES), c.select(nothing, zero, scale.value))


@kernel("x", "levels", "scales", "n")
def scale_by_turns(c: Code, a: SimpleNamespace, work: Work, *, size: int, peak: int) -> None:
    """Kernel: as `scale_only` without weights, but improve levels one by one, in five rounds (make_q3_quants)."""
    with c.range(0, a.n) as group:
        xs = side_by_side(c, a.x + group * (4 * LANES * size), size)
        held = c.scratch(4 * LANES * size)
        most, magnitude = largest_lanes(c, xs, size)
        nothing = magnitude < NOTHING
        zero = c.const(F32xN, 0.0)
        iscale = c.const(F32xN, float(-peak)) / most
        sum_lx, sum_l2 = c.var(zero), c.var(zero)
        for i in range(size):
            x = c.load(F32xN, xs + 64 * i)
            l = clamp(c, nearest(c, iscale * x), -peak, peak - 1).to(F32xN)  # noqa: E741
            c.store(held + 64 * i, l)
            w = x * x
            sum_lx.value, sum_l2.value = sum_lx.value + w * x * l, sum_l2.value + w * l * l
        with c.range(0, 5):  # rounds after one without changes have no effect
            for i in range(size):
                x, l = c.load(F32xN, xs + 64 * i), c.load(F32xN, held + 64 * i)  # noqa: E741
                w = x * x
                slx, sl2 = sum_lx.value - w * x * l, sum_l2.value - w * l * l
                on = slx > 0.0
                new = clamp(c, nearest(c, x * sl2 / slx), -peak, peak - 1).to(F32xN)
                slx, sl2 = slx + w * x * new, sl2 + w * new * new
                better = (sl2 > 0.0) & (slx * slx * sum_l2.value > sum_lx.value * sum_lx.value * sl2)
                better = better & on & new.differs(l)
                c.store(held + 64 * i, c.select(better, new, l))
                sum_lx.value = c.select(better, slx, sum_lx.value)
                sum_l2.value = c.select(better, sl2, sum_l2.value)
        to = a.levels + group * (LANES * size)
        for i in range(size):
            l = c.load(F32xN, held + 64 * i).to(I32xN) + peak  # noqa: E741
            _store_levels(c, to, i, c.select(nothing, c.const(I32xN, 0), l))
        scale = c.select(sum_l2.value > 0.0, sum_lx.value / sum_l2.value, zero)
        c.store(a.scales + group * (4 * LANES), c.select(nothing, zero, scale))


@kernel("x", "weights", "levels", "scales", "n")
def positive(c: Code, a: SimpleNamespace, work: Work, *, size: int, peak: int) -> None:
    """Kernel: fit x ≈ scale · level with levels 0 … `peak`, for the scales of groups (make_qp_quants).

    A few scales are tried, then levels are improved one by one.
    """
    with c.range(0, a.n) as group:
        xs = side_by_side(c, a.x + group * (4 * LANES * size), size)
        ws = side_by_side(c, a.weights + group * (4 * LANES * size), size)
        held = c.scratch(4 * LANES * size)
        zero = c.const(F32xN, 0.0)
        most = zero
        for i in range(size):
            x = c.load(F32xN, xs + 64 * i)
            most = c.select(most > x, most, x)
        nothing = most < NOTHING

        def error(iscale: Value, scale: Value, bounded: bool) -> Value:
            total = zero
            for i in range(size):
                x = c.load(F32xN, xs + 64 * i)
                l = nearest(c, iscale * x)  # noqa: E741
                l = c.min(l, peak) if bounded else l & 255  # noqa: E741
                diff = x - scale * l.to(F32xN)
                total = total + c.load(F32xN, ws + 64 * i) * diff * diff
            return total

        iscale = c.const(F32xN, float(peak)) / most
        best_iscale = c.var(iscale)
        best = c.var(error(iscale, c.const(F32xN, 1.0) / iscale, False))
        with c.range(-4, 5) as s:
            iscale = (c.f32(0.1) * s.to(F32) + float(peak)).splat(LANES) / most
            found = error(iscale, c.const(F32xN, 1.0) / iscale, True)
            better = (found < best.value) & s.differs(0).splat(LANES)
            best.value = c.select(better, found, best.value)
            best_iscale.value = c.select(better, iscale, best_iscale.value)
        sum_lx, sum_l2 = c.var(zero), c.var(zero)
        for i in range(size):
            x, w = c.load(F32xN, xs + 64 * i), c.load(F32xN, ws + 64 * i)
            whole = c.min(nearest(c, best_iscale.value * x), peak)
            c.store(held + 64 * i, (whole & 255).to(F32xN))  # levels are bytes
            l = whole.to(F32xN)  # noqa: E741
            sum_lx.value, sum_l2.value = sum_lx.value + w * x * l, sum_l2.value + w * l * l
        with c.range(0, 5):
            for i in range(size):
                x, w, l = (c.load(F32xN, at + 64 * i) for at in (xs, ws, held))  # noqa: E741
                slx, sl2 = sum_lx.value - w * x * l, sum_l2.value - w * l * l
                on = (slx > 0.0) & (sl2 > 0.0)
                new = c.min(nearest(c, x * sl2 / slx), peak)
                as_float = new.to(F32xN)
                slx, sl2 = slx + w * x * as_float, sl2 + w * as_float * as_float
                better = on & as_float.differs(l) & (slx * slx * sum_l2.value > sum_lx.value * sum_lx.value * sl2)
                c.store(held + 64 * i, c.select(better, (new & 255).to(F32xN), l))
                sum_lx.value = c.select(better, slx, sum_lx.value)
                sum_l2.value = c.select(better, sl2, sum_l2.value)
        to = a.levels + group * (LANES * size)
        for i in range(size):
            l = c.load(F32xN, held + 64 * i).to(I32xN)  # noqa: E741
            _store_levels(c, to, i, c.select(nothing, c.const(I32xN, 0), l))
        scale = c.select(sum_l2.value > 0.0, sum_lx.value / sum_l2.value, zero)
        c.store(a.scales + group * (4 * LANES), c.select(nothing, zero, scale))


# --- called from Python -----------------------------------------------------------------------------------------------

_lock = threading.Lock()


@cache
def _jit() -> Jit:
    return Jit()


@cache
def _function(which: Kernel, parameters: tuple[tuple[str, Any], ...]) -> Callable[[int, int, int, int, int], None]:
    return _jit().function(which, **dict(parameters))


def call(which: Kernel, fields: dict[str, NDArray[Any] | int | float], **parameters: Any) -> None:
    """Run a kernel on this thread, without the GIL."""
    with _lock:
        function = _function(which, tuple(sorted(parameters.items())))
    values = {key: value.ctypes.data if isinstance(value, np.ndarray) else value for key, value in fields.items()}
    packed = np.array(which.pack(values), np.int64)
    function(packed.ctypes.data, 0, 1, 0, 0)


def padded(x: Floats) -> Floats:
    rest = -len(x) % LANES
    x = np.ascontiguousarray(x, np.float32)
    return np.concatenate([x, np.zeros((rest, x.shape[1]), np.float32)]) if rest else x


def _search(
    which: Kernel, inputs: Sequence[tuple[str, Floats]], outputs: Sequence[str], **parameters: Any
) -> list[Any]:
    n, size = inputs[0][1].shape
    fields: dict[str, Any] = {name: padded(x) for name, x in inputs}
    rows = len(fields["x"])
    levels = np.empty((rows // LANES, size, LANES), np.uint8)
    found = {name: np.empty(rows, np.float32) for name in outputs}
    call(which, {**fields, "levels": levels, **found, "n": rows // LANES}, size=size, **parameters)
    return [levels.swapaxes(1, 2).reshape(rows, size)[:n], *(found[name][:n] for name in outputs)]


def group_sums(x: Floats, *, squares: bool) -> Floats:
    """Return each row's sum, or that of its squares, added in order: float32[n]."""
    groups = padded(x)
    y = np.empty(len(groups), np.float32)
    call(sums, {"x": groups, "y": y, "n": len(groups) // LANES}, size=x.shape[1], squares=squares)
    return y[: len(x)]


def fit_scale_and_min(
    x: Floats, weights: Floats, peak: int, low: float, step: float, steps: int, *, absolute: bool, bounded: bool
) -> tuple[Bytes, Floats, Floats]:
    """Return levels, scales and minima (see `scale_and_min`)."""
    levels, scales, mins = _search(
        scale_and_min, [("x", x), ("weights", weights)], ["scales", "mins"],
        peak=peak, low=low, step=step, steps=steps, absolute=absolute, bounded=bounded,
    )  # fmt: skip
    return levels, scales, mins


def fit_scale(x: Floats, weights: Floats | None, peak: int) -> tuple[Bytes, Floats]:
    """Return levels and scales (see `scale_only`)."""
    given = x if weights is None else weights
    levels, scales = _search(
        scale_only, [("x", x), ("weights", given)], ["scales"], peak=peak, weighted=weights is not None
    )
    return levels, scales


def fit_scale_by_turns(x: Floats, peak: int) -> tuple[Bytes, Floats]:
    """Return levels and scales (see `scale_by_turns`)."""
    levels, scales = _search(scale_by_turns, [("x", x)], ["scales"], peak=peak)
    return levels, scales


def fit_positive(x: Floats, weights: Floats, peak: int) -> tuple[Bytes, Floats]:
    """Return levels and scales (see `positive`)."""
    levels, scales = _search(positive, [("x", x), ("weights", weights)], ["scales"], peak=peak)
    return levels, scales
