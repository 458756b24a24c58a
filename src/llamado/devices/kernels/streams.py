"""Operations on several streams of hidden states (DSV4_HC_*): mixing them, reading from them, adding to them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from llamado.devices.kernel import kernel
from llamado.devices.kernels import maths
from llamado.devices.simd import F32, I32, Code, Type, Value, Var, Work

_STRIP = 64
"""Elements of a row that a thread computes at a time."""
N_STREAMS = 4
"""Number of streams that can be mixed; ggml supports no other."""


def _by_strips(c: Code, work: Work, n: Value, n_rows: Value, make: Callable[[Value, Value, int], None]) -> None:
    """Call make(row, first element, count) for all elements of all rows."""
    strips = (n + (_STRIP - 1)) // _STRIP
    with c.shares(work, n_rows * strips, c.i64(1)) as item:
        row, first = item // strips, item % strips * _STRIP
        end = c.min(first + _STRIP, n)
        last8 = first + (end - first) // 8 * 8
        with c.range(first, last8, 8) as at:
            make(row, at, 8)
        with c.range(last8, end) as at:
            make(row, at, 1)


def _same(c: Code, lanes: int, address: Value) -> Value:
    """Load one number into all lanes."""
    return c.load(F32, address) if lanes == 1 else c.splat_load(Type("f32", lanes), address)


@kernel("x", "x1", "x2", "w", "w1", "w2", "y", "y1", "n", "n_streams", "n_tokens", "factor")
def read_streams(c: Code, a: SimpleNamespace, work: Work, *, gated: bool) -> None:
    """y = factor · Σ over streams of x · w for each token. w is a number for each stream, or, if `gated`, the sigmoid
    of one for each of its elements.
    """

    factor = a.factor.to(I32).bits(F32)

    def make(token: Value, at: Value, lanes: int) -> None:
        type_ = Type("f32", lanes)
        x, w = a.x + token * a.x2, a.w + token * (a.w2 if gated else a.w1)
        total = c.var(c.const(type_, 0.0))
        with c.range(0, a.n_streams) as i:
            part = maths.sigmoid(c, c.load(type_, w + i * a.w1 + at * 4)) if gated else _same(c, lanes, w + i * 4)
            total.value = total.value + c.load(type_, x + i * a.x1 + at * 4) * part
        c.store(a.y + token * a.y1 + at * 4, total.value * (factor if lanes == 1 else factor.splat(lanes)))

    _by_strips(c, work, a.n, a.n_tokens, make)


@kernel(*("x", "x1", "r", "r1", "r2", "p", "p1", "m", "m1", "m2", "y", "y1", "y2", "n", "n_streams", "n_tokens"))
def add_to_streams(c: Code, a: SimpleNamespace, work: Work, *, mixed: bool) -> None:
    """y = x · p for each stream, plus the stream r itself, or plus Σ over streams of r · m if they are `mixed`."""

    def make(row: Value, at: Value, lanes: int) -> None:
        type_ = Type("f32", lanes)
        stream, token = row % a.n_streams, row // a.n_streams
        r = a.r + token * a.r2 + at * 4
        own = c.load(type_, a.x + token * a.x1 + at * 4) * _same(c, lanes, a.p + token * a.p1 + stream * 4)
        total = c.var(own)
        if mixed:
            with c.range(0, a.n_streams) as i:
                part = _same(c, lanes, a.m + token * a.m2 + i * a.m1 + stream * 4)
                total.value = total.value + c.load(type_, r + i * a.r1) * part
        else:
            total.value = total.value + c.load(type_, r + stream * a.r1)
        c.store(a.y + token * a.y2 + stream * a.y1 + at * 4, total.value)

    _by_strips(c, work, a.n, a.n_streams * a.n_tokens, make)


@kernel("x", "x1", "factors", "shifts", "y", "y2", "n_tokens", "eps", "n_rounds")
def mix_streams(c: Code, a: SimpleNamespace, work: Work) -> None:
    """y = for each token a matrix [to, from], normalized `n_rounds` times so that its columns, and then its rows, sum
    to one.

    It starts as the softmax of each row of the part of x after the first two numbers of each stream.
    """
    n, eps = N_STREAMS, a.eps.to(I32).bits(F32)
    with c.shares(work, a.n_tokens, c.i64(1)) as token:
        factor = c.load(F32, a.factors + 8)
        at = a.x + token * a.x1
        found: list[Value] = []
        for source in range(n):
            first = 4 * (2 * n + n * source)
            row = [c.load(F32, at + first + 4 * i) * factor for i in range(n)]
            row = [v + c.load(F32, a.shifts + first + 4 * i) for i, v in enumerate(row)]
            most = row[0]
            for v in row[1:]:
                most = c.max(most, v)
            row = [maths.exp(c, v - most) for v in row]
            total = _total(row)
            found += [v / total + eps for v in row]
        cells = [c.var(v) for v in found]
        columns = [[cells[i + n * source] for source in range(n)] for i in range(n)]
        rows = [[cells[i + n * source] for i in range(n)] for source in range(n)]
        _level(columns, eps)
        with c.range(1, a.n_rounds):
            _level(rows, eps)
            _level(columns, eps)
        for i, cell in enumerate(cells):
            c.store(a.y + token * a.y2 + 4 * i, cell.value)


def _total(values: list[Value]) -> Value:
    total = values[0]
    for v in values[1:]:
        total = total + v
    return total


def _level(lines: list[list[Var]], eps: Value) -> None:
    for line in lines:
        total = _total([cell.value for cell in line]) + eps
        for cell in line:
            cell.value = cell.value / total
