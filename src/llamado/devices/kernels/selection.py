"""Top-k of rows of logits in order, and sampling from them by a sampler chain."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from llamado.devices.drawing import Cut
from llamado.devices.kernel import kernel
from llamado.devices.kernels.maths import exp64
from llamado.devices.simd import F32, F64, I32, I64, Code, Type, Value, Work

BLOCK = 64
"""Elements per block. The largest of each block is found first: most blocks contain no top-k element and are
skipped.
"""

_WIDE = Type("f32", 16)
_HUGE = 3.4028234663852886e38  # the largest f32


def _before(c: Code, x: Value, one: Value, other: Value) -> Value:
    """Return true if element `one` comes before element `other`: it is larger, or equal and earlier."""
    v, w = c.load(F32, x + one * 4), c.load(F32, x + other * 4)
    return (v > w) | (v.equals(w) & (one < other))


def _get(c: Code, heap: Value, i: Value) -> Value:
    return c.load(I32, heap + i * 4).to(I64)


def _put(c: Code, heap: Value, i: Value, place: Value) -> None:
    c.store(heap + i * 4, place.to(I32))


def _sink(c: Code, x: Value, heap: Value, root: Value, stop: Value) -> None:
    """Sift the element at `root` down to its place in the heap."""
    at, moved = c.var(root), _get(c, heap, root)
    with c.loop() as loop:
        left = at.value * 2 + 1
        c.leave(loop, left >= stop)
        right = c.min(left + 1, stop - 1)
        child = c.select(_before(c, x, _get(c, heap, left), _get(c, heap, right)), right, left)
        c.leave(loop, _before(c, x, moved, _get(c, heap, child)).equals(0))
        _put(c, heap, at.value, _get(c, heap, child))
        at.value = child
    _put(c, heap, at.value, moved)


def _offer(c: Code, x: Value, heap: Value, n: Value, k: Value, place: Value) -> None:
    """Offer one more element to a heap of the first k of the `n` before it, with the last of them at its root."""
    with c.when(n < k):
        _put(c, heap, n, place)
    with c.when(n.equals(k - 1)), c.range(0, k // 2) as i:
        _sink(c, x, heap, k // 2 - 1 - i, k)
    with c.when(n >= k), c.when(_before(c, x, place, _get(c, heap, c.i64(0)))):
        _put(c, heap, c.i64(0), place)
        _sink(c, x, heap, c.i64(0), k)


def _masses(c: Code, logits: Value, masses: Value, n: Value) -> Value:
    """Store running sums of the weights of `n` logits in descending order (f64); return the last sum."""
    high, total = c.load(F64, logits), c.var(c.const(F64, 0.0))
    with c.range(0, n) as i:
        total.value = total.value + exp64(c, c.load(F64, logits + i * 8) - high)
        c.store(masses + i * 8, total.value)
    return total.value


def _count(c: Code, numbers: Value, n: Value, counts: Callable[[Value], Value]) -> Value:
    """Count the f64 that satisfy a condition."""
    found = c.var(c.i64(0))
    with c.range(0, n) as i:
        found.value = found.value + counts(c.load(F64, numbers + i * 8)).zext(I64)
    return found.value


def _draw(c: Code, values: Value, k: Value, logits: Value, drawing: Value) -> Value:
    """Return the position drawn among `k` values in descending order; `drawing`, `logits`: see `top_of_rows`.

    The order of sums and comparisons is that of engine/sampling/samplers.py and selectors.py.
    """
    steps, n_steps, u = c.load(I64, drawing), c.load(I64, drawing + 8), c.load(F64, drawing + 16)
    masses, n, least_of_all = logits + k * 8, c.var(k), c.const(F64, -float("inf"))
    with c.range(0, k) as i:
        c.store(logits + i * 8, c.load(F32, values + i * 4).to(F64))
    with c.range(0, n_steps) as number:
        step = steps + number * 24
        cut, value = c.load(F64, step).to(I64), c.load(F64, step + 8)
        least, high = c.load(F64, step + 16).to(I64), c.load(F64, logits)
        with c.when(cut.equals(Cut.TOP_P) & (high > least_of_all)):
            enough = _masses(c, logits, masses, n.value) * value
            short = _count(c, masses, n.value, lambda mass: mass < enough)
            n.value = c.min(n.value, c.max(short + 1, least))
        with c.when(cut.equals(Cut.MIN_P)):
            floor = (high + value).to(F32).to(F64)
            n.value = c.min(n.value, c.max(_count(c, logits, n.value, lambda logit: logit >= floor), least))
        with c.when(cut.equals(Cut.TEMPERATURE)), c.range(0, n.value) as i:
            c.store(logits + i * 8, c.min(c.load(F64, logits + i * 8) / value, _HUGE))
    place = c.var(c.i64(0))
    with c.when(c.load(F64, logits) > least_of_all):
        drawn = _masses(c, logits, masses, n.value) * u
        place.value = c.min(_count(c, masses, n.value, lambda mass: mass <= drawn), n.value - 1)
    return place.value


@kernel("rows", "ks", "n", "n_rows", "stride", "places", "values", "numbers", "greatest", "drawings", "logits", "drawn")
def top_of_rows(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Find the first k of the `n` elements of each row of f32 in descending order, equal ones in row order.

    `rows`, `ks`: i64 [n_rows], the address and the k of each row; `places` (i32), `values` (f32): results [n_rows,
    stride]; `numbers`: i64 [n_rows], 0 if the row has a NaN or +inf, which makes its other results meaningless;
    `greatest`: f32 scratch, one per block.

    `drawings`: 24 bytes per row: the address of the steps of its chain (see Drawing), their number, or -1 for a row
    without drawing, and a random number (f64); `logits`: f64 [2 · stride] scratch; `drawn`: i64 [n_rows], the position
    in the row of the drawn element.
    """
    n_blocks = (a.n + (BLOCK - 1)) // BLOCK
    whole = a.n // BLOCK
    infinite = float("inf")
    with c.range(0, a.n_rows) as row:
        x, k = c.load(I64, a.rows + row * 8), c.load(I64, a.ks + row * 8)
        heap, values = a.places + row * a.stride * 4, a.values + row * a.stride * 4
        # a value that is not below infinity makes its lane 0 permanently
        sound, least, none = c.var(c.const(_WIDE, 1.0)), c.const(_WIDE, -infinite), c.const(_WIDE, 0.0)
        with c.range(0, whole) as block:
            at, high = x + block * (4 * BLOCK), least
            for lanes in range(BLOCK // 16):
                v = c.load(_WIDE, at + 64 * lanes)
                sound.value = c.select(v < c.const(_WIDE, infinite), sound.value, none)
                high = c.max(v, high)
            halves = [c.shuffle(high, None, range(i, i + 8)) for i in (0, 8)]
            c.store(a.greatest + block * 4, c.max_lanes(c.max(*halves)))
        with c.when(whole < n_blocks):
            last = c.var(c.f32(-infinite))
            with c.range(whole * BLOCK, a.n) as i:
                v = c.load(F32, x + i * 4)
                with c.when((v < infinite).equals(0)):
                    sound.value = none
                last.value = c.max(v, last.value)
            c.store(a.greatest + whole * 4, last.value)
        low, high = (c.shuffle(sound.value, None, range(i, i + 8)) for i in (0, 8))
        counted = c.sum_lanes(c.min(low, high))
        c.store(a.numbers + row * 8, (counted > 7.5).zext(I64))
        # k blocks have an element that is not below the bound, so the first k elements are not below it either
        bound = c.var(c.f32(-infinite))
        with c.when(n_blocks >= k):
            with c.range(0, n_blocks) as block:
                _offer(c, a.greatest, heap, block, k, block)
            bound.value = c.load(F32, a.greatest + _get(c, heap, c.i64(0)) * 4)
        found = c.var(c.i64(0))
        with c.range(0, n_blocks) as block, c.when(c.load(F32, a.greatest + block * 4) >= bound.value):
            last_of_block = c.min(block * BLOCK + BLOCK, a.n)
            with c.range(block * BLOCK, last_of_block) as i, c.when(c.load(F32, x + i * 4) >= bound.value):
                _offer(c, x, heap, found.value, k, i)
                found.value = found.value + 1
        with c.when(counted > 7.5):
            with c.range(1, k) as i:
                last_one = k - i
                worst = _get(c, heap, c.i64(0))
                _put(c, heap, c.i64(0), _get(c, heap, last_one))
                _put(c, heap, last_one, worst)
                _sink(c, x, heap, c.i64(0), last_one)
            with c.range(0, k) as i:
                c.store(values + i * 4, c.load(F32, x + _get(c, heap, i) * 4))
            drawing = a.drawings + row * 24
            with c.when(c.load(I64, drawing + 8) >= 0):
                c.store(a.drawn + row * 8, _get(c, heap, _draw(c, values, k, a.logits, drawing)))
