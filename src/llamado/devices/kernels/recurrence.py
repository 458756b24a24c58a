"""Linear attention with a recurrent state: each head's state is a matrix that tokens update one after the other.

Tokens are processed in order with the same operations, so one token at a time and many at once give the same bits. A
state is read at one place and written to another (or the same). Its rows are independent, so threads share the rows of
all heads of all sequences.

`by_rows`: the numbers of a row belong to keys. S[j] is row j, x the row's dot product with a vector:
 gated delta rule (Yang et al., arXiv 2412.06464): S[j] = w·S[j] + (v[j] - x)·beta·k with x = S[j]·(w·k); out = S[j]·q;
 RWKV-7 (arXiv 2503.14456): S[j] = w·S[j] + v[j]·k + x·b with x = S[j]·a; out = S[j]·r.
Dot products run over 16 partial sums (element i belongs to number i % 16) and one fixed tree.

`by_columns`: the numbers of a row belong to values, rows to keys. S[i] is row i:
 gated linear attention (arXiv 2312.06635): S[i] = w[i]·S[i] + k[i]·v; out = Σ q[i]·S[i];
 RWKV-6 (arXiv 2404.05892): out = Σ r[i]·(S[i] + u[i]·k[i]·v), then S[i] = w[i]·S[i] + k[i]·v.
Sums run over the rows in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from llamado.devices.kernel import kernel
from llamado.devices.simd import F32, I32, I64, Code, F32x8, Value, Var, Work

ROWS = 8
"""Rows of a state that a thread takes through all tokens before the next rows."""
PARTS = 16
"""Partial sums of a dot product; head sizes are a multiple of them."""

_ANY_STATE = (
    "state", "state_row", "ids", "n_states",
    "kept", "kept1", "kept_rows", "kept_ids", "states", "states_row",
    "out", "n_tokens", "n_heads", "n_seqs", "scale",
)  # fmt: skip


def _operand(*names: str) -> tuple[str, ...]:
    """Fields of vectors: that of token t and head h (of `heads`) of sequence s is at t·token + h % heads·head +
    s·seq.
    """
    return tuple(name + suffix for name in names for suffix in ("", "_head", "_token", "_seq", "_heads"))


DELTA = ("q", "k", "v", "w", "beta")
LINEAR = ("q", "k", "v", "w")


class _State:
    """Source and target address of a sequence's state, and the vectors of its tokens."""

    def __init__(self, c: Code, a: SimpleNamespace, seq: Value, head: Value, *, chosen: bool, keeps: str) -> None:
        self.c, self.a, self.seq, self.head = c, a, seq, head
        row, to = seq, a.states + seq * a.states_row
        if chosen:  # as in GET_ROWS: the first row for an invalid number
            id_ = c.load(I32, a.ids + seq * 4).to(I64)
            row = c.select((id_ >= 0) & (id_ < a.n_states), id_, c.i64(0))
        if keeps:  # as in SET_ROWS: an invalid number is not written there
            wide = I64 if keeps == "I64" else I32
            id_ = c.load(wide, a.kept_ids + seq * wide.bytes).to(I64)
            to = c.select((id_ >= 0) & (id_ < a.kept_rows), a.kept + id_ * a.kept1, to)
        self.source, self.target = a.state + row * a.state_row, to

    def vector(self, name: str, token: Value) -> Value:
        """Address of a vector of this head."""
        base, head, step, seq, heads = (getattr(self.a, name + s) for s in ("", "_head", "_token", "_seq", "_heads"))
        at: Value = base + self.head % heads * head + token * step + self.seq * seq
        return at

    def output(self, token: Value, size: int) -> Value:
        """Address of this head's output for a token."""
        a = self.a
        at: Value = a.out + ((self.seq * a.n_tokens + token) * a.n_heads + self.head) * (4 * size)
        return at


@kernel(*_ANY_STATE, *_operand(*DELTA, "a", "b"), "n_snapshots", "snapshot")
def by_rows(
    c: Code,
    a: SimpleNamespace,
    work: Work,
    *,
    size: int,
    lanes: int,
    rule: str,
    vector: bool,
    chosen: bool,
    keeps: str,
    snapshots: bool,
) -> None:
    """Update states row by row. `rule`: "delta" or "rwkv7"; `vector`: a decay for each element of a row, otherwise one
    per head.

    `chosen`: states are rows `ids` of `n_states`, otherwise they are consecutive. `keeps`: the type of the row numbers
    the new states are written to, "" to leave them in the result. With `snapshots`, the states of up to `n_snapshots`
    tokens before the last are written `snapshot` bytes apart.
    """
    blocks = size // ROWS
    with c.shares(work, a.n_seqs * a.n_heads * blocks, c.i64(1)) as unit:
        first, rest = unit % blocks * ROWS, unit // blocks
        state = _State(c, a, rest // a.n_heads, rest % a.n_heads, chosen=chosen, keeps=keeps)
        inside = (state.head * size + first) * (4 * size)
        source, target = c.var(state.source + inside), state.target + inside
        with c.range(0, a.n_tokens) as token:
            rows = _Rows(state, source.value, target, token, size, lanes)
            values = c.load(F32x8, state.vector("v", token) + first * 4)
            if rule == "delta":
                x = rows.dots("k", "w" if vector else None)
                decay = None if vector else c.load(F32, state.vector("w", token))
                if decay is not None:
                    x = x * decay.splat(ROWS)
                change = (values - x) * c.load(F32, state.vector("beta", token)).splat(ROWS)
                found = rows.changed([("k", change)], decay)
            else:
                found = rows.changed([("k", values), ("b", rows.dots("a", None))], None)
            scale = a.scale.to(I32).bits(F32).splat(ROWS)
            c.store(state.output(token, size) + first * 4, found * scale)
            source.value = target
            if snapshots:
                back = a.n_tokens - 1 - token
                with c.when((back > 0) & (back < a.n_snapshots)), c.range(0, ROWS * size, 8) as i:
                    c.store(target + back * a.snapshot + i * 4, c.load(F32x8, target + i * 4))


class _Rows:
    """Eight rows of a state at one token."""

    def __init__(self, state: _State, source: Value, target: Value, token: Value, size: int, lanes: int) -> None:
        self.c, self.state, self.token, self.size = state.c, state, token, size
        self.source, self.target = source, target
        self.type = F32._replace(lanes=lanes)
        # A vector's partial sums take 16 registers of 8 lanes for eight rows: more than some processors have.
        self.groups = [range(8)] if lanes == PARTS else [range(4), range(4, 8)]

    def _vectors(self, i: Value) -> list[Value]:
        """Byte offsets of the vectors of the 16 elements from `i` on."""
        return [(i + lane) * 4 for lane in range(0, PARTS, self.type.lanes)]

    def _sums(self, n: int) -> list[list[Var]]:
        zero = self.c.const(self.type, 0.0)
        return [[self.c.var(zero) for _ in range(PARTS // self.type.lanes)] for _ in range(n)]

    def _total(self, sums: Sequence[Sequence[Var]]) -> Value:
        """Eight dot products."""
        c, halves = self.c, []
        for parts in sums:
            if len(parts) == 2:
                low, high = parts[0].value, parts[1].value
            else:
                low, high = (c.shuffle(parts[0].value, None, range(at, at + 8)) for at in (0, 8))
            halves.append(low + high)
        return c.sum_lanes8(halves)

    def dots(self, name: str, weights: str | None) -> Value:
        """Dot product of each row with a vector, which is multiplied by another one first if `weights` names it."""
        c = self.c
        x = self.state.vector(name, self.token)
        w = None if weights is None else self.state.vector(weights, self.token)
        sums = self._sums(ROWS)
        for group in self.groups:
            with c.range(0, self.size, PARTS) as i:
                for part, at in enumerate(self._vectors(i)):
                    factor = c.load(self.type, x + at)
                    if w is not None:
                        factor = factor * c.load(self.type, w + at)
                    for row in group:
                        cells = c.load(self.type, self.source + (row * 4 * self.size) + at)
                        sums[row][part].value = c.fma(cells, factor, sums[row][part].value)
        return self._total(sums)

    def changed(self, terms: Sequence[tuple[str, Value]], decay: Value | None) -> Value:
        """Decay each row, add its number of each term times the term's vector, and return its dot product with q."""
        c = self.c
        q, w = (self.state.vector(name, self.token) for name in ("q", "w"))
        vectors = [self.state.vector(name, self.token) for name, _ in terms]
        sums = self._sums(ROWS)
        fade = None if decay is None else decay.splat(self.type.lanes)
        for group in self.groups:
            factors = {row: [n.lane(row).splat(self.type.lanes) for _, n in terms] for row in group}
            with c.range(0, self.size, PARTS) as i:
                for part, at in enumerate(self._vectors(i)):
                    reads, faded = c.load(self.type, q + at), fade or c.load(self.type, w + at)
                    added = [c.load(self.type, vector + at) for vector in vectors]
                    for row in group:
                        place = row * 4 * self.size
                        cells = c.load(self.type, self.source + place + at) * faded
                        for factor, more in zip(factors[row], added, strict=True):
                            cells = c.fma(factor, more, cells)
                        c.store(self.target + place + at, cells)
                        sums[row][part].value = c.fma(cells, reads, sums[row][part].value)
        return self._total(sums)


@kernel(*_ANY_STATE, *_operand(*LINEAR), "bonus", "bonus_head")
def by_columns(
    c: Code, a: SimpleNamespace, work: Work, *, size: int, lanes: int, bonus: bool, chosen: bool, keeps: str
) -> None:
    """Update states column by column. `bonus`: a token's contribution to its own output before it changes the state
    (RWKV-6). See `by_rows` for the rest.
    """
    blocks, type_ = size // PARTS, F32._replace(lanes=lanes)
    scale = a.scale.to(I32).bits(F32)
    with c.shares(work, a.n_seqs * a.n_heads * blocks, c.i64(1)) as unit:
        first, rest = unit % blocks * (4 * PARTS), unit // blocks
        state = _State(c, a, rest // a.n_heads, rest % a.n_heads, chosen=chosen, keeps=keeps)
        inside = state.head * (4 * size * size) + first
        source, target = c.var(state.source + inside), state.target + inside
        places = [4 * lane for lane in range(0, PARTS, lanes)]
        with c.range(0, a.n_tokens) as token:
            q, k, v, w = (state.vector(name, token) for name in LINEAR)
            values = [c.load(type_, v + first + place) for place in places]
            sums = [c.var(c.const(type_, 0.0)) for _ in places]
            with c.range(0, size) as i:
                key, read, fade = (c.load(F32, vector + i * 4) for vector in (k, q, w))
                read = read * scale
                extra = c.load(F32, a.bonus + state.head * a.bonus_head + i * 4) if bonus else None
                for place, value, total in zip(places, values, sums, strict=True):
                    cells = c.load(type_, source.value + i * (4 * size) + place)
                    more = value * key.splat(lanes)
                    after = c.fma(cells, fade.splat(lanes), more)
                    seen = after if extra is None else c.fma(more, extra.splat(lanes), cells)
                    total.value = c.fma(seen, read.splat(lanes), total.value)
                    c.store(target + i * (4 * size) + place, after)
            for place, total in zip(places, sums, strict=True):
                c.store(state.output(token, size) + first + place, total.value)
            source.value = target
