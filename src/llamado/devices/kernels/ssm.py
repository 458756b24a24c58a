"""State-space models: the convolution before the scan, and the scan that updates a sequence's state token by token.

A token's result is computed in one order for any number of tokens: each lane of a state decays and adds its input, then
the lanes are summed as everywhere. Threads share heads and channels, never tokens.
"""

from __future__ import annotations

from types import SimpleNamespace

from llamado.devices.kernel import kernel
from llamado.devices.kernels import maths
from llamado.devices.simd import F32, I32, I64, Code, F32x8, Type, Value, Work

MAX_PLACES = 16
"""Most tokens that a convolution spans; models have 3 or 4."""
_F32x4 = Type("f32", 4)


@kernel("x", "x1", "x2", "k", "k1", "y", "y1", "y2", "n_channels", "n_tokens", "n_seqs")
def ssm_conv(c: Code, a: SimpleNamespace, work: Work, *, places: int, wide: bool) -> None:
    """y[seq, token, channel] = Σ_i x[seq, channel, token + i] · k[channel, i].

    `wide`: there are at least eight channels, and they are processed eight at a time (the last eight overlap).
    """
    lanes = 8 if wide else 1
    blocks = (a.n_channels + (lanes - 1)) // lanes
    with c.shares(work, blocks * a.n_seqs, c.i64(4)) as unit:
        seq, channel = unit // blocks, c.min(unit % blocks * lanes, a.n_channels - lanes)
        rows = [a.x + seq * a.x2 + (channel + r) * a.x1 for r in range(lanes)]
        kernels = [a.k + (channel + r) * a.k1 for r in range(lanes)]
        y = a.y + seq * a.y2 + channel * 4
        weights = _columns(c, kernels, places)
        eights = a.n_tokens // 8 * 8 if wide else c.i64(0)
        if wide:
            _eights(c, a, rows, kernels, y, eights, places)
        with c.range(eights, a.n_tokens) as token:
            inputs = _columns(c, [row + token * 4 for row in rows], places)
            total = inputs[0] * weights[0]
            for value, weight in zip(inputs[1:], weights[1:], strict=True):
                total = c.fma(value, weight, total)
            c.store(y + token * a.y1, total)


def _eights(
    c: Code, a: SimpleNamespace, rows: list[Value], kernels: list[Value], y: Value, n: Value, places: int
) -> None:
    """Convolve eight channels for `n` tokens, eight tokens at a time, channel by channel."""
    with c.range(0, n, 8) as token:
        sums = []
        for row, own in zip(rows, kernels, strict=True):
            total = c.load(F32x8, row + token * 4) * c.splat_load(F32x8, own)
            for i in range(1, places):
                total = c.fma(c.load(F32x8, row + (token + i) * 4), c.splat_load(F32x8, own + 4 * i), total)
            sums.append(total)
        for t, column in enumerate(c.transpose8(sums)):
            c.store(y + (token + t) * a.y1, column)


_STREAM = 64
"""Tokens that are convolved at a time: their rows are in as many pages of memory."""


@kernel(
    "before",
    "before1",
    "before2",
    "x",
    "x1",
    "x2",
    "k",
    "k1",
    "y",
    "y1",
    "y2",
    "last",
    "n_channels",
    "n_tokens",
    "n_seqs",
)
def ssm_stream(c: Code, a: SimpleNamespace, work: Work, *, places: int, vectors: int) -> None:
    """`ssm_conv` of tokens x[seq, token, channel] that follow those in before[seq, channel, i]; the same bits.

    last[seq, channel, i] receives the last tokens, for the next call. `vectors` of eight channels are processed
    together (0: one channel); the last of them overlap if there are fewer channels.
    """
    lanes, type_ = (8, F32x8) if vectors else (1, F32)
    n = lanes * max(vectors, 1)
    blocks, stretches = (a.n_channels + (n - 1)) // n, (a.n_tokens + (_STREAM - 1)) // _STREAM
    with c.shares(work, blocks * stretches * a.n_seqs, c.i64(2)) as unit:
        channel, rest = c.min(unit % blocks * n, a.n_channels - n), unit // blocks
        first, seq = rest % stretches * _STREAM, rest // stretches
        x, y = a.x + seq * a.x2 + channel * 4, a.y + seq * a.y2 + channel * 4
        groups = range(0, n, lanes)
        weights = [_columns(c, [a.k + (channel + g + r) * a.k1 for r in range(lanes)], places) for g in groups]
        window = [[c.var(c.const(type_, 0.0)) for _ in range(places - 1)] for _ in groups]
        with c.when(first.equals(0)):
            for g, seen in zip(groups, window, strict=True):
                rows = [a.before + seq * a.before2 + (channel + g + r) * a.before1 for r in range(lanes)]
                for var, value in zip(seen, _columns(c, rows, places - 1), strict=True):
                    var.value = value
        with c.when(first > 0):
            for g, seen in zip(groups, window, strict=True):
                for i, var in enumerate(seen):
                    var.value = c.load(type_, x + (first - (places - 1) + i) * a.x1 + 4 * g)
        stop = c.min(first + _STREAM, a.n_tokens)
        with c.range(first, stop) as token:
            for g, own, seen in zip(groups, weights, window, strict=True):
                inputs = [*(var.value for var in seen), c.load(type_, x + token * a.x1 + 4 * g)]
                total = inputs[0] * own[0]
                for value, weight in zip(inputs[1:], own[1:], strict=True):
                    total = c.fma(value, weight, total)
                c.store(y + token * a.y1 + 4 * g, total)
                for var, value in zip(seen, inputs[1:], strict=True):
                    var.value = value
        with c.when(stop.equals(a.n_tokens)):
            for g, seen in zip(groups, window, strict=True):
                at = a.last + (seq * a.n_channels + channel + g) * (4 * (places - 1))
                for i, var in enumerate(seen):
                    value = var.value
                    for r in range(lanes):
                        c.store(at + 4 * (r * (places - 1) + i), value.lane(r) if lanes > 1 else value)


def _columns(c: Code, rows: list[Value], n: int) -> list[Value]:
    """Load the first, second … of `n` numbers at each of eight addresses, or of one."""
    if len(rows) == 1:
        return [c.load(F32, rows[0] + 4 * i) for i in range(n)]
    if n == 4:
        return c.transpose8x4([c.load(_F32x4, row) for row in rows])
    return [c.gather(F32, [row + 4 * i for row in rows]) for i in range(n)]


TOKENS = 32
"""Tokens that are processed at a time: their results stay in L1 until all of a state's columns are done."""

ROWS = 8
"""Rows of a state that are processed together: they share the data loaded for a token."""

SCRATCH = 4 * TOKENS * 10 * ROWS
"""Bytes: for each token and row a step, an input, and eight sums."""

_SCAN = (
    *("s", "s3", "n_rows", "ids", "id0", "x", "x1", "x2", "x3", "dt", "dt1", "dt2", "a"),
    *("b", "b1", "b2", "b3", "c", "c1", "c2", "c3", "y", "states", "n_states"),
    *("kept", "kept1", "kept_rows", "kept_ids"),
    *("n_head", "head_dim", "n_group", "n_tokens", "n_seqs", "scratch", "scratch_step"),
)


class _Sequence:
    """Addresses of a sequence's state before its first token, and of its new state."""

    def __init__(self, c: Code, a: SimpleNamespace, seq: Value, size: Value, *, keeps: str) -> None:
        """`size`: bytes of a sequence's state."""
        row = c.load(I32, a.ids + seq * a.id0).to(I64)
        self.before = a.s + c.select((row >= 0) & (row < a.n_rows), row, c.i64(0)) * a.s3
        self.after = a.states + seq * size
        if keeps:
            wide = I64 if keeps == "I64" else I32
            target = c.load(wide, a.kept_ids + seq * wide.bytes).to(I64)
            inside = (target >= 0) & (target < a.kept_rows)
            self.after = c.select(inside, a.kept + target * a.kept1, self.after)


def _walk(
    c: Code,
    a: SimpleNamespace,
    n: Value,
    rows: list[tuple[Value, Value]],
    lanes: Value,
    columns: tuple[Value, Value],
    decay: tuple[Value, ...],
    inputs: Value,
    sums: Value,
    vectors: int,
) -> None:
    """Update some rows of a state, each with a source and a target address, for `n` tokens, `vectors` columns at a
    time.

    `lanes`: of a row. `columns`: addresses of the input and output vectors (B and C) of the first token. `decay`: the
    factors of all tokens; or their steps, and the rates that make factors of them. `inputs`, `sums`: input and result
    of each token and row.
    """
    with c.range(0, lanes, 8 * vectors) as j:
        starts = [[c.load(F32x8, read + (j + 8 * v) * 4) for v in range(vectors)] for read, _ in rows]
        states = [[c.var(value) for value in row] for row in starts]
        rates = []
        if len(decay) > 1:
            rates = [[c.load(F32x8, rate + (j + 8 * v) * 4) for v in range(vectors)] for rate in decay[1:]]
        with c.range(0, n) as t:
            b = [c.load(F32x8, columns[0] + t * a.b2 + (j + 8 * v) * 4) for v in range(vectors)]
            read = [c.load(F32x8, columns[1] + t * a.c2 + (j + 8 * v) * 4) for v in range(vectors)]
            if not rates:
                factor = c.splat_load(F32x8, decay[0] + t * 4)
            for r, row in enumerate(states):
                at = t * len(rows) + r
                x = c.splat_load(F32x8, inputs + at * 4)
                total = c.load(F32x8, sums + at * 32)
                for v, state in enumerate(row):
                    if rates:
                        factor = maths.exp(c, c.splat_load(F32x8, decay[0] + at * 4) * rates[r][v])
                    state.value = c.fma(b[v], x, state.value * factor)
                    total = c.fma(state.value, read[v], total)
                c.store(sums + at * 32, total)
        for (_, left), row in zip(rows, states, strict=True):
            for v, state in enumerate(row):
                c.store(left + (j + 8 * v) * 4, state.value)


def _sum_up(c: Code, n: Value, sums: Value, rows: int, y: Value, step: Value) -> None:
    """Store the output of each of `n` tokens: the sum of eight lanes of each row."""
    with c.range(0, n) as t:
        parts = [c.load(F32x8, sums + (t * rows + r) * 32) for r in range(rows)]
        c.store(y + t * step, c.sum_lanes8(parts) if rows == 8 else c.sum_lanes(parts[0]))


def _tokens(c: Code, a: SimpleNamespace, first: Value) -> Value:
    """Number of tokens to process at a time from `first` on: they end where a state has to be stored."""
    return c.max(c.min(c.i64(TOKENS), a.n_tokens - first - (a.n_states - 1)), 1)


@kernel(*_SCAN)
def scan_heads(
    c: Code, a: SimpleNamespace, work: Work, *, lanes: int, rows: int, keeps: str, divided: bool = False
) -> None:
    """The scan of Mamba-2 (arXiv 2405.21060): one rate for each head, whose state has `head_dim` rows of `lanes`.

    `rows`: rows that are processed together. `keeps`: the type of the row numbers the last states are written to; "" if
    they stay in the result. `divided`: so many rows are a unit of work, otherwise a whole head.
    """
    vectors = 2 if lanes % 16 == 0 else 1
    row_bytes = 4 * lanes
    n_heads, parts = a.n_seqs * a.n_head, a.head_dim // rows
    with c.shares(work, n_heads * parts if divided else n_heads, c.i64(1)) as unit:
        first_row, stop_row, number = c.i64(0), a.head_dim, unit
        if divided:
            first_row, number = unit % parts * rows, unit // parts
            stop_row = first_row + rows
        head, seq = number % a.n_head, number // a.n_head
        size = a.head_dim * row_bytes
        sequence = _Sequence(c, a, seq, size * a.n_head, keeps=keeps)
        after = sequence.after + head * size
        before = c.var(sequence.before + head * size)
        group = head // (a.n_head // a.n_group)
        rate = c.load(F32, a.a + head * 4)
        scratch = a.scratch + work.thread * a.scratch_step
        steps, decay, inputs, sums = (scratch + 4 * TOKENS * part for part in (0, 1, 2, 2 + ROWS))
        first = c.var(c.i64(0))
        with c.loop() as loop:
            c.leave(loop, first.value >= a.n_tokens)
            at = first.value
            n = _tokens(c, a, at)
            with c.range(0, n) as t:
                step = maths.softplus(c, c.load(F32, a.dt + seq * a.dt2 + (at + t) * a.dt1 + head * 4))
                c.store(steps + t * 4, step)
                c.store(decay + t * 4, maths.exp(c, step * rate))
            x = a.x + seq * a.x3 + at * a.x2 + head * a.x1
            columns = (a.b + seq * a.b3 + at * a.b2 + group * a.b1, a.c + seq * a.c3 + at * a.c2 + group * a.c1)
            y = a.y + (((seq * a.n_tokens + at) * a.n_head + head) * a.head_dim) * 4
            with c.range(first_row, stop_row, rows) as row:
                with c.range(0, n) as t:
                    step = c.load(F32, steps + t * 4)
                    value = c.load(Type("f32", rows), x + t * a.x2 + row * 4)
                    c.store(inputs + t * (4 * rows), value * (step.splat(rows) if rows > 1 else step))
                    for r in range(rows):
                        c.store(sums + (t * rows + r) * 32, c.const(F32x8, 0.0))
                own = [(before.value + (row + r) * row_bytes, after + (row + r) * row_bytes) for r in range(rows)]
                _walk(c, a, n, own, c.i64(lanes), columns, (decay,), inputs, sums, vectors)
                _sum_up(c, n, sums, rows, y + row * 4, a.n_head * a.head_dim * 4)
            first.value = at + n
            before.value = after
            slot = a.n_tokens - first.value
            with c.when((slot > 0) & (slot < a.n_states)):
                earlier = a.states + (slot * a.n_seqs + seq) * size * a.n_head + head * size
                with c.range(first_row * row_bytes, stop_row * row_bytes, 32) as i:
                    c.store(earlier + i, c.load(F32x8, after + i))


@kernel(*_SCAN)
def scan_channels(c: Code, a: SimpleNamespace, work: Work, *, lanes: int, rows: int, keeps: str) -> None:
    """The scan of Mamba (arXiv 2312.00752): each channel is a head of one row, with a rate for each of its lanes."""
    vectors = 2 if lanes % 16 == 0 else 1
    row_bytes = 4 * lanes
    blocks = a.n_head // rows
    with c.shares(work, a.n_seqs * blocks, c.i64(1)) as unit:
        channel, seq = unit % blocks * rows, unit // blocks
        sequence = _Sequence(c, a, seq, a.n_head * row_bytes, keeps=keeps)
        scratch = a.scratch + work.thread * a.scratch_step
        steps, inputs, sums = (scratch + 4 * TOKENS * part for part in (0, ROWS, 2 * ROWS))
        before = c.var(sequence.before + channel * row_bytes)
        with c.range(0, a.n_tokens, TOKENS) as first:
            n = c.min(c.i64(TOKENS), a.n_tokens - first)
            group = channel // (a.n_head // a.n_group)
            with c.range(0, n) as t:
                type_ = Type("f32", rows)
                step = maths.softplus(c, c.load(type_, a.dt + seq * a.dt2 + (first + t) * a.dt1 + channel * 4))
                c.store(steps + t * (4 * rows), step)
                value = c.load(type_, a.x + seq * a.x3 + (first + t) * a.x2 + channel * a.x1)
                c.store(inputs + t * (4 * rows), value * step)
                for r in range(rows):
                    c.store(sums + (t * rows + r) * 32, c.const(F32x8, 0.0))
            columns = (
                a.b + seq * a.b3 + first * a.b2 + group * a.b1,
                a.c + seq * a.c3 + first * a.c2 + group * a.c1,
            )
            after = sequence.after + channel * row_bytes
            own = [(before.value + r * row_bytes, after + r * row_bytes) for r in range(rows)]
            rates = [a.a + (channel + r) * row_bytes for r in range(rows)]
            _walk(c, a, n, own, c.i64(lanes), columns, (steps, *rates), inputs, sums, vectors)
            y = a.y + ((seq * a.n_tokens + first) * a.n_head + channel) * 4
            _sum_up(c, n, sums, rows, y, a.n_head * 4)
            before.value = after
