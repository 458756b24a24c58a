"""Codebook points for four or eight weights at a time: nearest points and best scale.

If the nearest levels of some weights are not a point of the codebook, a neighbor in the lattice replaces them: the
points at the few smallest distances (`Neighbors`) are compared by weighted error (ggml-quants.c,
`iq2_find_best_neighbour` and the searches around it).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.devices.kernel import kernel
from llamado.devices.simd import F32, I8, I32, Code, Value, Work
from llamado.gguf.codebooks import codebook
from llamado.gguf.types import TensorType as T
from llamado.quantize.types.arithmetic import Floats, Ints
from llamado.quantize.types.search import LANES, F32xN, I8xN, I32xN, call, clamp, nearest

_BLOCKS = 1 << 10  # exceeds the number of 16-entry blocks in any list of neighbors
_DISTANCES = {T.IQ2_XXS: 2, T.IQ2_XS: 2, T.IQ2_S: 1, T.IQ1_S: 3, T.IQ1_M: 3, T.IQ3_XXS: 2, T.IQ3_S: 3}


class Neighbors(NamedTuple):
    """Lookup from levels to codebook points.

    `place` is indexed by the number whose digits are the levels. It holds the number of the point, or, if the levels
    are not a point, −1 − the first block of neighbors · 1024 − the number of blocks. A block has sixteen neighbors, the
    nearest first: `levels` int8[blocks, dims, 16] (the last block is padded with the first neighbor) and `numbers`
    int32[blocks, 16]. `points`: the levels of all points, float32[points, dims]. Levels count from 0.
    """

    base: int
    dims: int
    place: NDArray[np.int32]
    levels: NDArray[np.int8]
    numbers: NDArray[np.int32]
    points: NDArray[np.float32]


@cache
def neighbors(type_: T) -> Neighbors:
    """Return the lookup of a type's codebook."""
    book = codebook(type_)
    base, dims = len(book.levels), book.weights
    points = np.searchsorted(book.levels, np.array(book.points)).astype(np.int32)
    powers = base ** np.arange(dims)
    place = np.zeros(base**dims, np.int32)
    on_point = np.zeros(base**dims, np.bool_)
    place[points @ powers] = np.arange(len(points))
    on_point[points @ powers] = True
    off = np.flatnonzero(~on_point)
    where = off[:, None] // powers % base
    apart = (
        (where**2).sum(1)[:, None] + (points**2).sum(1) - 2 * (where.astype(np.float32) @ points.T.astype(np.float32))
    ).astype(np.int16)
    limit = np.full(len(off), -1, np.int16)
    for _ in range(_DISTANCES[type_]):
        limit = np.where(apart > limit[:, None], apart, np.int16(1 << 14)).min(1)
    rows, near = np.nonzero(apart <= limit[:, None])
    order = np.lexsort((near, apart[rows, near], rows))
    rows, near = rows[order], near[order]
    counts = np.bincount(rows, minlength=len(off))
    blocks = -(-counts // LANES)
    first = np.concatenate([[0], np.cumsum(blocks)])
    starts = np.concatenate([[0], np.cumsum(counts)])
    filled = np.repeat(near[starts[:-1]], blocks * LANES)
    at = np.arange(len(near)) - starts[rows] + first[rows] * LANES
    filled[at] = near
    place[off] = -1 - (first[:-1] * _BLOCKS + blocks)
    numbers = filled.reshape(-1, LANES).astype(np.int32)
    levels = points[numbers].swapaxes(1, 2).astype(np.int8)
    return Neighbors(base, dims, place, np.ascontiguousarray(levels), numbers, points.astype(np.float32))


def _fields(book: Neighbors) -> dict[str, NDArray[Any]]:
    return {"place": book.place, "near": book.levels, "numbers": book.numbers, "points": book.points}


def _nearest_of(
    c: Code,
    a: SimpleNamespace,
    place: Value,
    x: Sequence[Value],
    w: Sequence[Value],
    scale: Value,
    slope: float,
    shift: Value,
) -> Value:
    """Return the number of the neighbor q with the least Σ w · (scale · (slope · q + shift) − x)²; ties: the first."""
    code = -(place + 1)
    first, blocks = (code >> 10).zext(I32._replace(elem="i64")), (code & (_BLOCKS - 1)).zext(I32._replace(elem="i64"))
    xs, ws = [v.splat(LANES) for v in x], [v.splat(LANES) for v in w]
    scales, shifts = scale.splat(LANES), shift.splat(LANES)
    least, chosen = c.var(c.const(F32xN, 3.4028234663852886e38)), c.var(c.const(I32xN, 0))
    with c.range(0, blocks) as b:
        at = a.near + (first + b) * (LANES * len(x))
        total = c.const(F32xN, 0.0)
        for i in range(len(x)):
            level = c.load(I8xN, at + LANES * i).to(F32xN)
            q = (level * slope if slope != 1.0 else level) + shifts
            diff = scales * q - xs[i]
            total = total + ws[i] * diff * diff
        nearer = total < least.value
        least.value = c.select(nearer, total, least.value)
        chosen.value = c.select(nearer, b.to(I32).splat(LANES), chosen.value)
    position = chosen.value * LANES + c.const(I32xN, range(LANES))
    total, lanes = least.value, LANES
    while lanes > 1:
        lanes //= 2
        (low, high), (low_at, high_at) = (
            [c.shuffle(v, None, range(lanes * k, lanes * (k + 1))) for k in (0, 1)] for v in (total, position)
        )
        if lanes == 1:
            low, high, low_at, high_at = low.lane(0), high.lane(0), low_at.lane(0), high_at.lane(0)
        second = (high < low) | (high.equals(low) & (high_at < low_at))
        total, position = c.select(second, high, low), c.select(second, high_at, low_at)
    index = first * LANES + position.zext(I32._replace(elem="i64"))
    return c.load(I32, a.numbers + index * 4)


def _sum(c: Code, v: Value) -> Value:
    """Return the sum of integer lanes."""
    lanes = v.type.lanes
    while lanes > 2:
        lanes //= 2
        v = c.shuffle(v, None, range(lanes)) + c.shuffle(v, None, range(lanes, 2 * lanes))
    return v.lane(0) + v.lane(1)


@kernel("x", "weights", "roots", "most", "start", "place", "near", "numbers", "points", "found", "scales", "n")
def scale_and_points(
    c: Code, a: SimpleNamespace, work: Work, *, size: int, dims: int, base: int, tries: int, step: float, again: str
) -> None:
    """Kernel: fit x ≈ scale · (2q + 1), where q are the levels of `size`/`dims` points, by weighted squared errors.

    The scales `most` / (2·`base` − 1 + s · `step`), |s| ≤ `tries`, round x to levels; the best one by linear regression
    is used. Points are then searched again with it, depending on `again`: "all": all points; "group": all points of a
    group with one off the codebook; "off": only those off the codebook.
    """
    parts = size // dims
    vector, whole = F32._replace(lanes=dims), I32._replace(lanes=dims)
    powers = [base**k for k in range(dims)]

    with c.range(0, a.n) as g:
        xs, ws, roots = (at + g * (4 * size) for at in (a.x, a.weights, a.roots))
        most = c.load(F32, a.most + g * 4)

        def point(k: int, inverse: Value, scale: Value) -> tuple[Value, Value]:
            """Return the number of the point for part k, and its place, which is negative for a neighbor."""
            v = c.load(vector, xs + 4 * dims * k)
            l = clamp(c, nearest(c, (inverse.splat(dims) * v - 1.0) * 0.5), 0, base - 1)  # noqa: E741
            number = _sum(c, l * c.const(whole, powers))
            place = c.load(I32, a.place + number.zext(g.type) * 4)
            chosen = c.var(place)
            with c.when(place < 0):
                x, w = ([c.load(F32, at + 4 * (dims * k + i)) for i in range(dims)] for at in (xs, roots))
                chosen.value = _nearest_of(c, a, place, x, w, scale, 2.0, c.f32(1.0))
            return chosen.value, place

        def regress(numbers: Sequence[Value]) -> tuple[Value, Value]:
            sum_qx, sum_q2 = c.f32(0.0), c.f32(0.0)
            for k, number in enumerate(numbers):
                q = c.load(vector, a.points + number.zext(g.type) * (4 * dims)) * 2.0 + 1.0
                x, w = c.load(vector, xs + 4 * dims * k), c.load(vector, ws + 4 * dims * k)
                first, second = w * x * q, w * q * q
                for i in range(dims):
                    sum_qx, sum_q2 = sum_qx + first.lane(i), sum_q2 + second.lane(i)
            return sum_qx, sum_q2

        zero = c.const(I32, 0)
        scale, best = c.var(c.load(F32, a.start + g * 4)), c.var(c.f32(0.0))
        numbers = [c.var(zero) for _ in range(parts)]
        places = [c.var(c.const(I32, -1 if again == "group" else 0)) for _ in range(parts)]
        with c.range(-tries, tries + 1) as s:
            inverse = (c.f32(step) * s.to(F32) + float(2 * base - 1)) / most
            found = [point(k, inverse, c.f32(1.0) / inverse) for k in range(parts)]
            sum_qx, sum_q2 = regress([number for number, _ in found])
            better = (sum_q2 > 0.0) & (sum_qx * sum_qx > best.value * sum_q2)
            with c.when(better):
                scale.value = sum_qx / sum_q2
                best.value = scale.value * sum_qx
                for var, place_var, (number, place) in zip(numbers, places, found, strict=True):
                    var.value, place_var.value = number, place
        off = places[0].value < 0
        for place_var in places[1:]:
            off = off | (place_var.value < 0)
        with c.when((scale.value > 0.0) & (off if again != "all" else scale.value > 0.0)):
            inverse, kept = c.f32(1.0) / scale.value, scale.value
            for k in range(parts):
                with c.when((places[k].value < 0) if again == "off" else (kept > 0.0)):
                    numbers[k].value = point(k, inverse, kept)[0]
            sum_qx, sum_q2 = regress([var.value for var in numbers])
            scale.value = c.select(sum_q2 > 0.0, sum_qx / sum_q2, scale.value)
        for k in range(parts):
            c.store(a.found + g * (4 * parts) + 4 * k, numbers[k].value)
        c.store(a.scales + g * 4, scale.value)


def fit_points(
    type_: T, x: Floats, weights: Floats, most: Floats, start: Floats, *, tries: int, step: float, again: str
) -> tuple[Ints, Floats]:
    """Return point numbers, int32[n, points], and scales of groups (see `scale_and_points`)."""
    book = neighbors(type_)
    n, size = x.shape
    found, scales = np.empty((n, size // book.dims), np.int32), np.empty(n, np.float32)
    arrays = {"x": x, "weights": weights, "roots": np.sqrt(weights), "most": most, "start": start}
    kept = {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}
    call(
        scale_and_points, {**kept, **_fields(book), "found": found, "scales": scales, "n": n},
        size=size, dims=book.dims, base=book.base, tries=tries, step=step, again=again,
    )  # fmt: skip
    return found, scales


def signs(x: Floats, weights: Floats, *, even: bool) -> tuple[Floats, Ints]:
    """Return |x| and the signs of each eight elements as bits, uint8[n, row / 8].

    With `even`, the number of negative signs is made even: the element with the smallest weighted error gets the wrong
    sign, and is negative in the first result.
    """
    eights = x.reshape(-1, 8)
    negative = eights < 0
    left = np.abs(eights)
    if even:
        odd = np.flatnonzero(negative.sum(1) & 1)
        cost = weights.reshape(-1, 8)[odd] * eights[odd] * eights[odd]
        cheapest = cost.argmin(1)
        left[odd, cheapest] *= -1
        negative[odd, cheapest] ^= True
    return left.reshape(x.shape), np.packbits(negative, axis=1, bitorder="little").reshape(len(x), -1)


@kernel("x", "weights", "scales", "shifts", "levels", "place", "near", "numbers", "points", "found", "n")
def nearest_points(c: Code, a: SimpleNamespace, work: Work, *, dims: int, base: int) -> None:
    """Kernel: the point for levels, or the neighbor nearest to x at scale · (level − 1 + shift)."""
    powers = [base**k for k in range(dims)]
    with c.range(0, a.n) as g:
        levels = c.load(I8._replace(lanes=dims), a.levels + g * dims).zext(I32._replace(lanes=dims))
        number = _sum(c, levels * c.const(levels.type, powers))
        place = c.load(I32, a.place + number.zext(g.type) * 4)
        c.store(a.found + g * 4, place)
        with c.when(place < 0):
            x, w = ([c.load(F32, at + g * (4 * dims) + 4 * i) for i in range(dims)] for at in (a.x, a.weights))
            scale, shift = c.load(F32, a.scales + g * 4), c.load(F32, a.shifts + g * 4) - 1.0
            c.store(a.found + g * 4, _nearest_of(c, a, place, x, w, scale, 1.0, shift))


def find_points(
    type_: T, x: Floats, weights: Floats, scales: Floats, shifts: Floats, levels: Ints
) -> tuple[Ints, NDArray[np.bool_]]:
    """Return point numbers, int32[n], for levels uint8[n, 8], and whether they match exactly (see `nearest_points`)."""
    book = neighbors(type_)
    n = len(x)
    found = np.empty(n, np.int32)
    arrays = {"x": x, "weights": weights, "scales": scales, "shifts": shifts}
    kept: dict[str, Any] = {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}
    kept["levels"] = np.ascontiguousarray(levels, np.uint8)
    call(nearest_points, {**kept, **_fields(book), "found": found, "n": n}, dims=book.dims, base=book.base)
    return found, book.place[kept["levels"].astype(np.int64) @ (book.base ** np.arange(book.dims))] >= 0
