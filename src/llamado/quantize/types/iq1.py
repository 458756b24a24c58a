"""IQ1_S and IQ1_M: points of eight weights −1, 0 and 1, shifted by ±1/8 (ggml-quants.c).

The sorted weights of a group are divided into three levels. All divisions are tried, with both shifts (in IQ1_M, of
each half).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.devices.kernel import kernel
from llamado.devices.simd import Code, Value, Work
from llamado.gguf.types import TensorType as T
from llamado.quantize.types.arithmetic import Bytes, Floats, Ints, blocks, f32, halves, nearest
from llamado.quantize.types.iq2 import error_weights
from llamado.quantize.types.points import find_points, neighbors
from llamado.quantize.types.search import LANES, F32xN, I32xN, call, padded, side_by_side

_MOVE = 0.125
_LEAST = -3.4028234663852886e38


def iq1_s(x: Floats, weights: Floats | None) -> Bytes:
    w = error_weights(x, weights, 2).reshape(-1, 32)
    groups = x.reshape(-1, 32)
    found = _best_division(groups, w, two_halves=False, nothing=1e-12)
    moves = np.where(found.kind == 0, f32(_MOVE), f32(-_MOVE)).astype(np.float32)
    numbers, scales = _snap_to_points(T.IQ1_S, groups, w, found, np.repeat(moves, 4).reshape(-1, 4))
    d, levels = _shared_scale(scales.reshape(-1, 8))
    high = np.bitwise_or.reduce((numbers >> 8) << np.array([0, 3, 6, 9]), axis=1).reshape(-1, 8)
    down = ((moves.reshape(-1, 8) < 0) & (d != 0)[:, None]).astype(np.int32)
    high |= (levels | (down << 3)) << 12
    return blocks(
        halves(d * f32(1.125)),
        numbers.astype(np.uint8).reshape(-1, 32),
        high.astype("<u2").view(np.uint8).reshape(-1, 16),
    )


def iq1_m(x: Floats, weights: Floats | None) -> Bytes:
    w = error_weights(x, weights, 2).reshape(-1, 16)
    groups = x.reshape(-1, 16)
    found = _best_division(groups, w, two_halves=True, nothing=1e-7)
    # 0: both up, 1: second down, 2: first down, 3: both down
    moves = np.stack([np.where(found.kind < 2, _MOVE, -_MOVE), np.where(found.kind % 2 == 0, _MOVE, -_MOVE)], axis=1)
    moves = moves.astype(np.float32)
    numbers, scales = _snap_to_points(T.IQ1_M, groups, w, found, moves)
    d, levels = _shared_scale(scales.reshape(-1, 16))
    some = d != 0
    q = _values(T.IQ1_M, numbers, moves) * np.repeat(2 * levels + 1, 16).astype(np.float32).reshape(-1, 16)
    sum_qx, sum_q2 = _sums(w, q, groups, 256)
    d = np.where(some, np.divide(sum_qx, sum_q2, out=d.copy(), where=sum_q2 > 0), f32(0))
    masks = np.where(some[:, None], np.array([0, 0x80, 0x08, 0x88])[found.kind].reshape(-1, 16), 0)
    high = ((numbers[:, 0] >> 8) | ((numbers[:, 1] >> 8) << 4)).reshape(-1, 16) | masks
    words = np.bitwise_or.reduce(levels.reshape(-1, 4, 4) << np.array([0, 3, 6, 9]), axis=2)
    half = (d * f32(1.1125)).astype("<f2").view("<u2").astype(np.int32)
    words |= np.stack([(half & 15) << 12, (half & 0xF0) << 8, (half & 0xF00) << 4, half & 0xF000], axis=1)
    return blocks(
        numbers.astype(np.uint8).reshape(-1, 32),
        high.astype(np.uint8),
        words.astype("<u2").view(np.uint8).reshape(-1, 8),
    )


class _Division(NamedTuple):
    """Levels 0, 1, 2 of groups, uint8[n, size], their scales, and their shifts (0: up, 1: down; IQ1_M: two bits)."""

    levels: Ints
    scales: Floats
    kind: Ints
    empty: NDArray[np.bool_]


@kernel("x", "w", "scales", "first", "second", "kind", "n")
def division(c: Code, a: SimpleNamespace, work: Work, *, size: int) -> None:
    """Kernel: best division of groups into three, from prefix sums of w · x and w, float32[n, 40]; IQ1_S."""
    row = _padded_row(size)
    ups, downs = [-1 + _MOVE, _MOVE, 1 + _MOVE], [-1 - _MOVE, -_MOVE, 1 - _MOVE]
    with c.range(0, a.n) as group:
        xs = side_by_side(c, a.x + group * (4 * LANES * row), row)
        ws = side_by_side(c, a.w + group * (4 * LANES * row), row)
        x_first, w_first = c.load(F32xN, xs), c.load(F32xN, ws)
        x_last, w_last = c.load(F32xN, xs + 64 * size), c.load(F32xN, ws + 64 * size)
        take = _best(c, a, group)
        with c.range(0, size + 1) as i, c.range(i, size + 1) as j:
            xi, xj, wi, wj = (c.load(F32xN, at + k * 64) for at in (xs, ws) for k in (i, j))
            for kind, (low, middle, high) in enumerate((ups, downs)):
                sum_qx = (xi - x_first) * low + (xj - xi) * middle + (x_last - xj) * high
                sum_q2 = (wi - w_first) * low * low + (wj - wi) * middle * middle + (w_last - wj) * high * high
                take(sum_qx, sum_q2, i, j, kind)


@kernel("x", "w", "x2", "w2", "scales", "first", "second", "kind", "n")
def division_of_halves(c: Code, a: SimpleNamespace, work: Work, *, size: int) -> None:
    """Kernel: as `division`, from prefix sums of each half of a group; IQ1_M."""
    row = _padded_row(size)
    up, down = 1 + _MOVE, 1 - _MOVE
    squares = [(k + _MOVE) ** 2 for k in (-1, 0, 1)]
    up1, up2 = squares[0] - squares[1], squares[1] - squares[2]
    down1, down2 = squares[2] - squares[1], squares[1] - squares[0]
    with c.range(0, a.n) as group:
        sums = [
            (side_by_side(c, x + group * (4 * LANES * row), row), side_by_side(c, w + group * (4 * LANES * row), row))
            for x, w in ((a.x, a.w), (a.x2, a.w2))
        ]
        totals = [(c.load(F32xN, xs + 64 * size), c.load(F32xN, ws + 64 * size)) for xs, ws in sums]
        take = _best(c, a, group)
        with c.range(0, size + 1) as i, c.range(i, size + 1) as j:
            qx: list[list[Value]] = []
            q2: list[list[Value]] = []
            for (xs, ws), (x_all, w_all) in zip(sums, totals, strict=True):
                both = c.load(F32xN, xs + i * 64) + c.load(F32xN, xs + j * 64)
                wi, wj = c.load(F32xN, ws + i * 64), c.load(F32xN, ws + j * 64)
                qx.append([x_all * up - both, x_all * down - both])
                q2.append([w_all * up * up + wi * up1 + wj * up2, w_all * down * down + wi * down1 + wj * down2])
            for kind in range(4):
                take(qx[0][kind >> 1] + qx[1][kind & 1], q2[0][kind >> 1] + q2[1][kind & 1], i, j, kind)


def _best(c: Code, a: SimpleNamespace, group: Value) -> Callable[[Value, Value, Value, Value, int], None]:
    """Return a function that takes candidates in turn and stores the best: division, shift and scale."""
    zero = c.const(I32xN, -1)
    for name in ("first", "second", "kind"):
        c.store(getattr(a, name) + group * (4 * LANES), zero)
    best, scale = c.var(c.const(F32xN, _LEAST)), c.var(c.const(F32xN, 0.0))

    def take(sum_qx: Value, sum_q2: Value, i: Value, j: Value, kind: int) -> None:
        better = (sum_q2 > 0.0) & (sum_qx * sum_qx > best.value * sum_q2)
        scale.value = c.select(better, sum_qx / sum_q2, scale.value)
        best.value = c.select(better, scale.value * sum_qx, best.value)
        c.store(a.scales + group * (4 * LANES), scale.value)
        numbers = (i.to(zero.type._replace(lanes=1)), j.to(zero.type._replace(lanes=1)))
        new = (numbers[0].splat(LANES), numbers[1].splat(LANES), c.const(I32xN, kind))
        for name, value in zip(("first", "second", "kind"), new, strict=True):
            at = getattr(a, name) + group * (4 * LANES)
            c.store(at, c.select(better, value, c.load(I32xN, at)))

    return take


def _padded_row(size: int) -> int:
    return -(-(size + 1) // 8) * 8


def _best_division(x: Floats, w: Floats, *, two_halves: bool, nothing: float) -> _Division:
    n, size = x.shape
    order = np.argsort(x, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(size), order.shape), 1)
    weighted = np.take_along_axis(w * x, order, 1)
    sorted_w = np.take_along_axis(w, order, 1)
    parts = [order < size // 2, order >= size // 2] if two_halves else [np.True_]
    sums: dict[str, Floats] = {}
    for names, part in zip((("x", "w"), ("x2", "w2")), parts, strict=False):
        for name, values in zip(names, (weighted, sorted_w), strict=True):
            row = np.zeros((n, _padded_row(size)), np.float32)
            np.add.accumulate(np.where(part, values, f32(0)), axis=1, out=row[:, 1 : size + 1])
            sums[name] = padded(row)
    rows = len(sums["x"])
    scales = np.empty(rows, np.float32)
    first, second, kind = (np.empty(rows, np.int32) for _ in range(3))
    call(
        division_of_halves if two_halves else division,
        {**sums, "scales": scales, "first": first, "second": second, "kind": kind, "n": rows // LANES},
        size=size,
    )
    scales, first, second, kind = scales[:n], first[:n], second[:n], kind[:n]
    empty = (np.abs(x).max(1) < f32(nothing)) | (kind < 0)
    levels = (rank >= first[:, None]).astype(np.uint8) + (rank >= second[:, None])
    flipped = scales < 0
    levels = np.where(flipped[:, None], 2 - levels, levels).astype(np.uint8)
    last = 3 if two_halves else 1
    kind = np.where(empty, 0, np.where(flipped, last - kind, kind))
    return _Division(levels, np.where(empty, f32(0), np.abs(scales)), kind, empty)


def _snap_to_points(type_: T, x: Floats, w: Floats, found: _Division, moves: Floats) -> tuple[Ints, Floats]:
    """Return the point numbers of groups, int32[n, eights], and scales, refitted if a point is a neighbor."""
    eights = x.shape[1] // 8
    numbers, exact = find_points(
        type_, x.reshape(-1, 8), w.reshape(-1, 8), np.repeat(found.scales, eights), moves.reshape(-1),
        found.levels.reshape(-1, 8),
    )  # fmt: skip
    numbers = np.where(found.empty[:, None], 0, numbers.reshape(-1, eights))
    sum_qx, sum_q2 = _sums(w, _values(type_, numbers, moves), x, x.shape[1])
    anew = ~exact.reshape(-1, eights).all(1) & ~found.empty & (sum_qx > 0) & (sum_q2 > 0)
    return numbers, np.divide(sum_qx, sum_q2, out=found.scales.copy(), where=anew)


def _values(type_: T, numbers: Ints, moves: Floats) -> Floats:
    """Return the weights of points: −1, 0, 1, shifted."""
    found: Floats = neighbors(type_).points[numbers] - f32(1) + moves[:, :, None]
    return found.reshape(len(numbers), -1)


def _sums(w: Floats, q: Floats, x: Floats, row: int) -> tuple[Floats, Floats]:
    """Return the sums of w · q · x and of w · q² over `row` elements each, added in order."""
    wq = w * q
    return tuple(np.add.accumulate((wq * other).reshape(-1, row), axis=1)[:, -1] for other in (x, q))  # type: ignore[return-value]


def _shared_scale(scales: Floats) -> tuple[Floats, Ints]:
    d = scales.max(axis=1) / f32(15)
    inverse = np.divide(f32(1), d, out=np.zeros_like(d), where=d != 0)
    levels = np.clip(nearest(f32(0.5) * (inverse[:, None] * scales - f32(1))), 0, 7)
    levels[d == 0] = 0
    return d, levels
