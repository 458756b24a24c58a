"""Operations on whole rows, one thread per row: sums, argmax, sorting, pooling, key scores."""

from __future__ import annotations

from types import SimpleNamespace

from llamado.devices.kernel import kernel
from llamado.devices.kernels.floats import dot_rows
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.simd import F32, I32, I64, Code, F32x8, I32x8, Type, Value, Work
from llamado.gguf.types import TensorType

_KEYS = 64
"""Keys that a thread scores for a token at a time."""
_ROWS = ("x", "x1", "x2", "x3", "y", "y1", "y2", "y3", "n", "n1", "n2", "n3")
_STRIP = 64
"""Elements of a row that a thread sums at a time."""


def _rows(a: SimpleNamespace, row: Value) -> tuple[Value, Value]:
    """Addresses of row number `row` of x and of y."""
    i1, rest = row % a.n1, row // a.n1
    i2, i3 = rest % a.n2, rest // a.n2
    return a.x + i1 * a.x1 + i2 * a.x2 + i3 * a.x3, a.y + i1 * a.y1 + i2 * a.y2 + i3 * a.y3


@kernel(*_ROWS)
def reduce_rows(c: Code, a: SimpleNamespace, work: Work, *, kind: str) -> None:
    """y = one number for each row of f32: its "sum" or "mean" (f32), or the position of its maximum, "argmax" (i32).

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


_LEAST = -3.4028234663852886e38
"""The lowest f32, initial value of a window's maximum (FLT_MAX)."""


@kernel(*_ROWS, "m", "width", "k0", "k1", "s0", "s1", "p0", "p1")
def pool(c: Code, a: SimpleNamespace, work: Work, *, greatest: bool) -> None:
    """y = the maximum of the f32 in a window over x, or their mean with padding of 0.

    `n` and `m`: elements of rows of x, and its rows; the other sizes are those of y.
    """
    with c.shares(work, a.n1 * a.n2 * a.n3, c.i64(1)) as row:
        i1, rest = row % a.n1, row // a.n1
        i2, i3 = rest % a.n2, rest // a.n2
        x, y = a.x + i2 * a.x2 + i3 * a.x3, a.y + i1 * a.y1 + i2 * a.y2 + i3 * a.y3
        with c.range(0, a.width) as i0:
            found = c.var(c.f32(_LEAST if greatest else 0.0))
            with c.range(0, a.k1) as j1, c.range(0, a.k0) as j0:
                at1, at0 = i1 * a.s1 - a.p1 + j1, i0 * a.s0 - a.p0 + j0
                with c.when((at1 >= 0) & (at1 < a.m) & (at0 >= 0) & (at0 < a.n)):
                    v = c.load(F32, x + at1 * a.x1 + at0 * 4)
                    found.value = c.max(v, found.value) if greatest else found.value + v
            c.store(y + i0 * 4, found.value if greatest else found.value / (a.k0 * a.k1).to(F32))


@kernel(
    *("q", "q1", "q2", "q3", "k", "k2", "k3", "w", "w1", "w3", "mask", "mask1", "mask3", "y", "y1", "y3"),
    *("n", "n_head", "n_tokens", "n_kv", "n3"),
)
def score_keys(c: Code, a: SimpleNamespace, work: Work, *, keys: str) -> None:
    """y = Σ over heads of weight · max(query · key, 0), and the mask, for each token and key (LIGHTNING_INDEXER).

    A unit of work is a token and _KEYS keys.
    """
    form, blocks = FORMATS[TensorType[keys]], (a.n_kv + _KEYS - 1) // _KEYS
    with c.shares(work, blocks * a.n_tokens * a.n3, c.i64(1)) as unit:
        block, rest = unit % blocks, unit // blocks
        token, i3 = rest % a.n_tokens, rest // a.n_tokens
        q, w = a.q + token * a.q2 + i3 * a.q3, a.w + token * a.w1 + i3 * a.w3
        mask, y = a.mask + token * a.mask1 + i3 * a.mask3, a.y + token * a.y1 + i3 * a.y3
        first = block * _KEYS
        stop = c.select(first + _KEYS < a.n_kv, first + _KEYS, a.n_kv)
        with c.range(first, stop) as key:
            total = c.var(c.f32(0.0))
            with c.range(0, a.n_head) as head:
                row = a.k + key * a.k2 + i3 * a.k3
                [[product]] = dot_rows(c, form, [row], [q + head * a.q1], a.n)
                total.value = total.value + c.max(product, 0.0) * c.load(F32, w + head * 4)
            c.store(y + key * 4, total.value + c.load_f16(mask + key * 2))


@kernel(*_ROWS)
def cumulative_sum(c: Code, a: SimpleNamespace, work: Work) -> None:
    """y = running sums along each row of f32."""
    with c.shares(work, a.n1 * a.n2 * a.n3, c.i64(1)) as row:
        x, y = _rows(a, row)
        total = c.var(c.f32(0.0))
        with c.range(0, a.n) as i:
            total.value = total.value + c.load(F32, x + i * 4)
            c.store(y + i * 4, total.value)


@kernel(*_ROWS, "k0", "k1", "k2", "k3")
def add_copies(c: Code, a: SimpleNamespace, work: Work) -> None:
    """y = the sum of the k0 · k1 · k2 · k3 copies of it that x consists of, added in order; n to n3 are y's.

    A thread takes 64 elements of a row, whose sums stay in registers.
    """
    strips = (a.n + (_STRIP - 1)) // _STRIP

    def add(x: Value, y: Value, first: Value, lanes: int, many: int) -> None:
        type_ = Type("f32", lanes)
        sums = [c.var(c.const(type_, 0.0)) for _ in range(many)]
        with c.range(0, a.k3) as r3, c.range(0, a.k2) as r2, c.range(0, a.k1) as r1, c.range(0, a.k0) as r0:
            at = x + r3 * a.n3 * a.x3 + r2 * a.n2 * a.x2 + r1 * a.n1 * a.x1 + (r0 * a.n + first) * 4
            for i, total in enumerate(sums):
                total.value = total.value + c.load(type_, at + 4 * lanes * i)
        for i, total in enumerate(sums):
            c.store(y + first * 4 + 4 * lanes * i, total.value)

    with c.shares(work, a.n1 * a.n2 * a.n3 * strips, c.i64(1)) as item:
        x, y = _rows(a, item // strips)
        first = item % strips * _STRIP
        end = c.min(first + _STRIP, a.n)
        whole = (end - first).equals(_STRIP)
        with c.when(whole):
            add(x, y, first, 8, _STRIP // 8)
        with c.when(whole.equals(0)):
            last8 = first + (end - first) // 8 * 8
            with c.range(first, last8, 8) as at:
                add(x, y, at, 8, 1)
            with c.range(last8, end) as at:
                add(x, y, at, 1, 1)


@kernel(*_ROWS, "k")
def sort(c: Code, a: SimpleNamespace, work: Work, *, falling: bool, by_team: bool = False) -> None:
    """y = the positions (i32) of the first `k` elements of each row of f32 in order; equal elements keep their order.

    `by_team`: count the elements before each, of all elements at once.
    """
    with c.shares(work, a.n1 * a.n2 * a.n3, c.i64(1)) as row:
        x, y = _rows(a, row)
        (_sort_by_team if by_team else _sort_by_heap)(c, a, x, y, falling=falling)


def _sort_by_heap(c: Code, a: SimpleNamespace, x: Value, y: Value, *, falling: bool) -> None:
    """Keep a heap of the best k so far with the worst of them at its root; k = n sorts everything."""

    def before(one: Value, other: Value) -> Value:
        """Return true if element `one` comes before element `other`."""
        v, w = c.load(F32, x + one * 4), c.load(F32, x + other * 4)
        ahead = v > w if falling else v < w
        return ahead | (v.equals(w) & (one < other))

    def get(i: Value) -> Value:
        return c.load(I32, y + i * 4).to(I64)

    def put(i: Value, place: Value) -> None:
        c.store(y + i * 4, place.to(I32))

    def sink(root: Value, stop: Value) -> None:
        """Sift the element at `root` down to its place in the heap."""
        at, moved = c.var(root), get(root)
        with c.loop() as loop:
            left = at.value * 2 + 1
            c.leave(loop, left >= stop)
            right = c.min(left + 1, stop - 1)
            child = c.select(before(get(left), get(right)), right, left)
            c.leave(loop, before(moved, get(child)).equals(0))
            put(at.value, get(child))
            at.value = child
        put(at.value, moved)

    with c.range(0, a.k) as i:
        put(i, i)
    with c.range(0, a.k // 2) as i:
        sink(a.k // 2 - 1 - i, a.k)
    with c.range(a.k, a.n) as i, c.when(before(i, get(c.i64(0)))):
        put(c.i64(0), i)
        sink(c.i64(0), a.k)
    with c.range(1, a.k) as i:
        last = a.k - i
        worst = get(c.i64(0))
        put(c.i64(0), get(last))
        put(last, worst)
        sink(c.i64(0), last)


def _sort_by_team(c: Code, a: SimpleNamespace, x: Value, y: Value, *, falling: bool) -> None:
    """Count the elements before each. A row with NaN, which has no order, is left to one group."""

    def by_heap() -> Value:
        _sort_by_heap(c, a, x, y, falling=falling)
        return c.f32(0.0)

    n8 = a.n // 8 * 8
    missing = (c.var(c.const(F32x8, 0.0)), c.var(c.f32(0.0)))
    for flags, start, stop in ((missing[0], c.i64(0), n8), (missing[1], n8, a.n)):
        with c.several(start, stop, flags.type.lanes) as turns:
            values = [c.load(flags.type, x + turn.at * 4) for turn in turns]
            for v in values:
                flags.value = c.select(v.equals(v), flags.value, c.const(v.type, 1.0))
    has_nan = c.greatest(missing[0].value, missing[1].value) > 0.0
    with c.when(has_nan):
        c.once(by_heap)
    with c.when(has_nan.equals(0)), c.each(0, a.n) as i:
        own = c.load(F32, x + i * 4)
        counts = (c.var(c.const(I32x8, 0)), c.var(c.const(I32, 0)))
        for count, start, stop in ((counts[0], c.i64(0), n8), (counts[1], n8, a.n)):
            lanes = count.type.lanes
            with c.range(start, stop, lanes) as j:
                other, mine = c.load(Type("f32", lanes), x + j * 4), own if lanes == 1 else own.splat(lanes)
                inside = (i - j).to(I32)
                earlier = inside > 0 if lanes == 1 else c.const(I32x8, list(range(8))) < inside.splat(8)
                before = (other > mine if falling else other < mine) | (other.equals(mine) & earlier)
                one, none = c.const(count.type, 1), c.const(count.type, 0)
                count.value = count.value + c.select(before, one, none)
        place = (c.sum_lanes(counts[0].value) + counts[1].value).to(I64)
        with c.when(place < a.k):
            c.store(y + place * 4, i.to(I32))
    c.join()
