"""What a whole row comes to: sums, places of the greatest, orders. One thread takes a row."""

from __future__ import annotations

from types import SimpleNamespace

from llamado.devices.cpu.jit import kernel
from llamado.devices.cpu.simd import F32, I32, I64, Code, F32x8, Value, Work

_ROWS = ("x", "x1", "x2", "x3", "y", "y1", "y2", "y3", "n", "n1", "n2", "n3")


def _rows(a: SimpleNamespace, row: Value) -> tuple[Value, Value]:
    """Where row number `row` of x and of y lie."""
    i1, rest = row % a.n1, row // a.n1
    i2, i3 = rest % a.n2, rest // a.n2
    return a.x + i1 * a.x1 + i2 * a.x2 + i3 * a.x3, a.y + i1 * a.y1 + i2 * a.y2 + i3 * a.y3


@kernel(*_ROWS)
def reduce_rows(c: Code, a: SimpleNamespace, work: Work, *, kind: str) -> None:
    """y = one number for each row of f32: its "sum" or "mean" (f32), or the place of its greatest, "argmax" (i32).

    A sum has eight parts (element mod 8), as everywhere.
    """
    with c.shares(work, a.n1 * a.n2 * a.n3, c.i64(1)) as row:
        x, y = _rows(a, row)
        if kind == "argmax":
            best, place = c.var(c.load(F32, x)), c.var(c.i64(0))
            with c.range(1, a.n) as i:
                v = c.load(F32, x + i * 4)
                better = v > best.value
                best.value, place.value = c.select(better, v, best.value), c.select(better, i, place.value)
            c.store(y, place.value.to(I32))
        else:
            sums, tail, n8 = c.var(c.const(F32x8, 0.0)), c.var(c.f32(0.0)), a.n // 8 * 8
            with c.range(0, n8, 8) as i:
                sums.value = sums.value + c.load(F32x8, x + i * 4)
            with c.range(n8, a.n) as i:
                tail.value = tail.value + c.load(F32, x + i * 4)
            total = c.sum_lanes(sums.value) + tail.value
            c.store(y, total / a.n.to(F32) if kind == "mean" else total)


@kernel(*_ROWS)
def cumulate(c: Code, a: SimpleNamespace, work: Work) -> None:
    """y = running sums along each row of f32."""
    with c.shares(work, a.n1 * a.n2 * a.n3, c.i64(1)) as row:
        x, y = _rows(a, row)
        total = c.var(c.f32(0.0))
        with c.range(0, a.n) as i:
            total.value = total.value + c.load(F32, x + i * 4)
            c.store(y + i * 4, total.value)


@kernel(*_ROWS, "k")
def sort(c: Code, a: SimpleNamespace, work: Work, *, falling: bool) -> None:
    """y = the places (i32) of the first `k` elements of each row of f32 in order; equal ones keep theirs.

    A heap of the best k so far, the worst of them at its root: sorting all is k = n.
    """

    def before(x: Value, one: Value, other: Value) -> Value:
        """Whether element `one` comes before element `other`."""
        v, w = c.load(F32, x + one * 4), c.load(F32, x + other * 4)
        ahead = v > w if falling else v < w
        return ahead | (v.equals(w) & (one < other))

    def get(y: Value, i: Value) -> Value:
        return c.load(I32, y + i * 4).to(I64)

    def put(y: Value, i: Value, place: Value) -> None:
        c.store(y + i * 4, place.to(I32))

    def sink(x: Value, y: Value, root: Value, stop: Value) -> None:
        """Lets what is at `root` sink to where nothing below it comes later."""
        at, moved = c.var(root), get(y, root)
        with c.loop() as loop:
            left = at.value * 2 + 1
            c.leave(loop, left >= stop)
            right = c.min(left + 1, stop - 1)
            child = c.select(before(x, get(y, left), get(y, right)), right, left)
            c.leave(loop, before(x, moved, get(y, child)).equals(0))
            put(y, at.value, get(y, child))
            at.value = child
        put(y, at.value, moved)

    with c.shares(work, a.n1 * a.n2 * a.n3, c.i64(1)) as row:
        x, y = _rows(a, row)
        with c.range(0, a.k) as i:
            put(y, i, i)
        with c.range(0, a.k // 2) as i:
            sink(x, y, a.k // 2 - 1 - i, a.k)
        with c.range(a.k, a.n) as i, c.when(before(x, i, get(y, c.i64(0)))):
            put(y, c.i64(0), i)
            sink(x, y, c.i64(0), a.k)
        with c.range(1, a.k) as i:
            last = a.k - i
            worst = get(y, c.i64(0))
            put(y, c.i64(0), get(y, last))
            put(y, last, worst)
            sink(x, y, c.i64(0), last)
