"""Flash attention: softmax(q·kᵀ·scale + mask)·v with a running maximum, over key blocks of one fixed size in order.

What a query gets depends on its own visible keys alone. Blocks start at multiples of `BLOCK` cells; dot products run
over lanes of the head in one fixed tree; values are added key by key. So one query alone (`whole` blocks read
straight from the cache) and a tile of many (the block expanded to f32 once for all of them) give the same bits, and a
block that is masked for every query of a tile is skipped without changing any (its weights would be exactly zero).

Source of the method: Dao et al., FlashAttention (2022), online softmax of Milakov & Gimelshein (2018).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from llamado.devices.cpu.jit import kernel
from llamado.devices.cpu.kernels import maths
from llamado.devices.cpu.kernels.formats import FORMATS
from llamado.devices.cpu.simd import F32, I16, I32, I64, Code, F16x8, F32x8, Value, Var, Work
from llamado.gguf.types import TensorType

BLOCK = 32
"""Keys per block, the same for every kernel and batch size: it decides where the running maximum moves."""

_AHEAD = 4 * BLOCK
"""Cells ahead at which a single query asks for keys and values."""

_NONE = -1e30  # the maximum before any key; finite, so that −inf − maximum stays −inf


@kernel("mask", "nb1", "n_kv", "n_rows", "ranges")
def mask_ranges(c: Code, a: SimpleNamespace, work: Work) -> None:
    """For each row of an f16 mask: the first visible key and the one after the last (two i32; 0, 0 if none)."""
    with c.shares(work, a.n_rows, c.i64(1)) as row:
        at = a.mask + row * a.nb1

        def hidden(key: Value) -> Value:
            return c.load(I16, at + key * 2).equals(-1024)  # 0xFC00: −inf

        first, last = c.var(c.i64(0)), c.var(a.n_kv)
        with c.loop() as loop:  # whole blocks of hidden keys first
            c.leave(loop, first.value + 4 > a.n_kv)
            c.leave(loop, c.load(I64, at + first.value * 2).differs(-0x03FF03FF03FF0400))
            first.value = first.value + 4
        with c.loop() as loop:
            c.leave(loop, first.value >= a.n_kv)
            c.leave(loop, hidden(first.value).equals(0))
            first.value = first.value + 1
        with c.loop() as loop:
            c.leave(loop, last.value - 4 < first.value)
            c.leave(loop, c.load(I64, at + (last.value - 4) * 2).differs(-0x03FF03FF03FF0400))
            last.value = last.value - 4
        with c.loop() as loop:
            c.leave(loop, last.value <= first.value)
            c.leave(loop, hidden(last.value - 1).equals(0))
            last.value = last.value - 1
        empty = first.value >= last.value
        c.store(a.ranges + row * 8, c.select(empty, c.i64(0), first.value).to(I32))
        c.store(a.ranges + row * 8 + 4, c.select(empty, c.i64(0), last.value).to(I32))


_FIELDS = (
    "q", "q_token", "q_head", "q_stream",
    "k", "k_cell", "k_head", "k_stream",
    "v", "v_cell", "v_head", "v_stream",
    "mask", "mask_token", "mask_head", "mask_stream", "ranges", "ranges_head", "ranges_stream", "sinks", "slopes",
    "out", "out_head", "out_token", "out_stream",
    "n_tokens", "n_heads_kv", "n_streams", "group", "n_kv", "scale", "softcap", "scratch", "scratch_step",
)  # fmt: skip

DIRECT = 2
"""Queries of a tile that read keys and values where they lie; more of them share an expanded block."""


def scratch_bytes(head_k: int, head_v: int, tile: int) -> int:
    """Scratch one thread needs: outputs, scores and queries of a tile, a block of keys and of values in f32."""
    return 4 * (tile * (head_v + BLOCK + head_k) + BLOCK * (head_k + head_v)) + 64


class _Place:
    """Where a query's data lie in the tile's table, in bytes: addresses of its numbers, mask row and output, the first
    and the last + 1 cell it sees (two i32), its sink and its slope (f32).
    """

    Q, MASK, OUT, RANGE, SINK, SLOPE = 0, 8, 16, 24, 32, 36
    BYTES = 40


@kernel(*_FIELDS)
def flash_attention(
    c: Code,
    a: SimpleNamespace,
    work: Work,
    *,
    head_k: int,
    head_v: int,
    keys: str,
    values: str,
    tile: int,
    lanes: int,
    masked: bool,
    capped: bool,
    sinks: bool,
    biased: bool,
    shared: bool,
) -> None:
    """One unit of work is a tile of `tile` queries (token and head of one key head's group, heads fastest) of
    one key head.

    `lanes`, 8 or 16: numbers of a register. `sinks`: each head has one more key, a score without a value. `biased`:
    each head weighs the mask by its slope. `shared`: values are the beginnings of the keys' rows.
    """
    k_type, v_type = TensorType[keys], TensorType[values]
    scale, softcap = a.scale.to(I32).bits(F32), a.softcap.to(I32).bits(F32)
    rows = a.n_tokens * a.group
    tiles = (rows + (tile - 1)) // tile
    outputs = a.scratch + work.thread * a.scratch_step
    scores = outputs + 4 * tile * head_v
    queries = scores + 4 * tile * BLOCK
    k_block = queries + 4 * tile * head_k
    v_block = k_block + 4 * BLOCK * head_k
    step = 2 if c.lowering.columns > 4 and tile % 2 == 0 else 1  # queries whose values are added at once
    groups, part = _groups(tile, lanes, step), _part(head_v, lanes)

    with c.shares(work, tiles * a.n_heads_kv * a.n_streams, c.i64(1)) as unit:
        # the longest tiles (the last tokens see most keys) are handed out first
        number = tiles - 1 - unit // (a.n_heads_kv * a.n_streams)
        rest = unit % (a.n_heads_kv * a.n_streams)
        head, stream = rest % a.n_heads_kv, rest // a.n_heads_kv
        places = c.scratch(_Place.BYTES * tile)
        peaks, sums, fades = c.scratch(4 * tile), c.scratch(32 * tile), c.scratch(4 * tile)
        start, stop = c.var(a.n_kv), c.var(c.i64(0))
        with c.range(0, tile) as j:
            row = c.min(number * tile + j, rows - 1)
            token, h = row // a.group, head * a.group + row % a.group
            place = places + j * _Place.BYTES
            c.store(place + _Place.Q, a.q + token * a.q_token + h * a.q_head + stream * a.q_stream)
            mask = a.mask + token * a.mask_token + h * a.mask_head + stream * a.mask_stream
            c.store(place + _Place.MASK, mask)
            c.store(place + _Place.OUT, a.out + h * a.out_head + token * a.out_token + stream * a.out_stream)
            if sinks:
                c.store(place + _Place.SINK, c.load(F32, a.sinks + h * 4))
            if biased:
                c.store(place + _Place.SLOPE, c.load(F32, a.slopes + h * 4))
            c.store(peaks + j * 4, c.f32(_NONE))
            c.store(sums + j * 32, c.const(F32x8, 0.0))
            if masked:
                range_ = a.ranges + token * 8 + h * a.ranges_head + stream * a.ranges_stream
                c.store(place + _Place.RANGE, c.load(I64, range_))
                start.value = c.min(start.value, c.load(I32, range_).to(I64))
                stop.value = c.max(stop.value, c.load(I32, range_ + 4).to(I64))
        if not masked:
            start.value, stop.value = c.i64(0), a.n_kv
        with c.range(0, tile * head_v, 8) as i:
            c.store(outputs + i * 4, c.const(F32x8, 0.0))
        for group in groups:
            if group.lanes > 8:
                _interleave(c, group, places, queries, head_k)

        k_head = a.k + head * a.k_head + stream * a.k_stream
        v_head = a.v + head * a.v_head + stream * a.v_stream
        caches = [(_Cells(k_head, a.k_cell, k_type), head_k)]
        if not shared:
            caches.append((_Cells(v_head, a.v_cell, v_type), head_v))
        if tile <= DIRECT:  # weights have passed through all caches since these cells were last read
            for cells, head_size in caches:
                _fetch(c, cells, start.value, c.min(start.value + _AHEAD, stop.value), head_size)
        with c.range(start.value // BLOCK * BLOCK, stop.value, BLOCK) as first:
            here = c.min(stop.value - first, BLOCK)
            if tile <= DIRECT:
                for cells, head_size in caches:
                    _fetch(c, cells, first + _AHEAD, c.min(first + (_AHEAD + BLOCK), stop.value), head_size)
            wanted = c.var(c.i64(0 if masked else 1))
            if masked:
                with c.range(0, tile) as j:
                    wanted.value = wanted.value | _sees(c, places + j * _Place.BYTES, first)
            with c.when(wanted.value > 0):
                keys_, values_ = _Cells(k_head, a.k_cell, k_type), _Cells(v_head, a.v_cell, v_type)
                if tile > DIRECT:
                    keys_ = _expand(c, keys_, first, here, a.n_kv, head_k, k_block)
                    values_ = keys_ if shared else _expand(c, values_, first, here, a.n_kv, head_v, v_block)
                block = _Block(first, here, stop.value, a.n_kv)
                scoring = _Scoring(scale, softcap if capped else None, masked, biased)
                # eight keys, and then a part of all values, stay in the first cache for all queries of the tile
                with c.range(0, here, 8) as k8:
                    for group in groups:
                        with c.range(group.first, group.stop, group.queries) as j:
                            seen = _seen(c, places, j, group.queries, first, masked=masked)
                            with c.when(seen > 0):
                                _score(c, keys_, head_k, places, queries, scores, j, group, k8, block, scoring)
                with c.range(0, tile) as j, c.when(_seen(c, places, j, 1, first, masked=masked) > 0):
                    fade = _soften(c, scores + j * (4 * BLOCK), here, peaks + j * 4, sums + j * 32)
                    c.store(fades + j * 4, fade)
                with c.range(0, head_v, part[0] * part[1]) as d, c.range(0, tile, step) as j:
                    seen = _seen(c, places, j, step, first, masked=masked)
                    with c.when(seen.equals(step)):
                        _mix(c, values_, head_v, d, part, scores, outputs, fades, j, step, block)
                    if masked and step > 1:  # two sequences meet: what one of them does not see may be no number
                        with (
                            c.when(seen.equals(1)),
                            c.range(j, j + step) as one,
                            c.when(_sees(c, places + one * _Place.BYTES, first) > 0),
                        ):
                            _mix(c, values_, head_v, d, part, scores, outputs, fades, one, 1, block)

        with c.range(0, tile) as j:
            total = c.sum_lanes(c.load(F32x8, sums + j * 32))
            share = c.f32(1.0)
            if sinks:
                peak, sink = c.load(F32, peaks + j * 4), c.load(F32, places + j * _Place.BYTES + _Place.SINK)
                greatest = c.max(peak, sink)
                share = maths.exp(c, peak - greatest)
                total = total * share + maths.exp(c, sink - greatest)
            inverse = c.select(total > 0.0, share / total, c.f32(0.0)).splat(8)
            to = c.load(I64, places + j * _Place.BYTES + _Place.OUT)
            with c.range(0, head_v, 8) as d:
                c.store(to + d * 4, c.load(F32x8, outputs + (j * head_v + d) * 4) * inverse)


class _Cells(NamedTuple):
    """Where keys or values lie: cell i of the cache at base + i·step, or (expanded) cell i of the block."""

    base: Value
    step: Value
    type: TensorType
    expanded: bool = False

    def row(self, c: Code, block: _Block, i: Value) -> Value:
        """Address of the block's cell i; cells past the cache repeat its last one."""
        number = i if self.expanded else c.min(block.first + i, block.n_kv - 1)
        return self.base + number * self.step


class _Block(NamedTuple):
    """A block of keys: its first cell, how many are wanted, the first no query of the tile sees, the cache's end."""

    first: Value
    here: Value
    stop: Value
    n_kv: Value


class _Scoring(NamedTuple):
    """What is done to a product to make it a score."""

    scale: Value
    softcap: Value | None
    masked: bool
    biased: bool


class _Group(NamedTuple):
    """Queries of a tile, from `first` to `stop`, whose scores are computed `queries` at a time.

    A register has 8 lanes of one query, or 16: eight of one and eight of the next, which lie so in scratch.
    """

    first: int
    stop: int
    queries: int
    lanes: int


def _groups(tile: int, lanes: int, step: int) -> list[_Group]:
    """How the queries of a tile are taken: what the registers hold, and the rest."""
    if lanes == 16 and tile > DIRECT and tile % 2 == 0:
        fours = tile // 4 * 4
        return [_Group(*g, lanes) for g in ((0, fours, 4), (fours, tile, 2)) if g[0] < g[1]]
    return [_Group(0, tile, step, 8)]


def _part(head: int, lanes: int) -> tuple[int, int]:
    """Lanes of a register for values, and how many registers of a head are filled at once."""
    lanes = lanes if head % lanes == 0 else 8
    n = min(8, head // lanes)
    while (head // lanes) % n:
        n -= 1
    return lanes, n


def _sees(c: Code, place: Value, first: Value) -> Value:
    """1 where the query at `place` sees a cell of the block at `first`, else 0."""
    low, high = c.load(I32, place + _Place.RANGE).to(I64), c.load(I32, place + (_Place.RANGE + 4)).to(I64)
    return ((low < first + BLOCK) & (high > first)).zext(I64)


def _seen(c: Code, places: Value, j: Value, n: int, first: Value, *, masked: bool) -> Value:
    """How many of the queries j … j+n−1 see a cell of the block at `first`."""
    if not masked:
        return c.i64(n)
    seen = _sees(c, places + j * _Place.BYTES, first)
    for s in range(1, n):
        seen = seen + _sees(c, places + (j + s) * _Place.BYTES, first)
    return seen


def _fetch(c: Code, cells: _Cells, first: Value, stop: Value, head: int) -> None:
    """Asks for cells: the rows of one head are far apart, which hardware does not foresee."""
    with c.range(first, stop) as i:
        for byte in range(0, cells.type.row_bytes(head), 64):
            c.prefetch(cells.base + i * cells.step + byte, near=False)


def _expand(c: Code, cells: _Cells, first: Value, here: Value, n_kv: Value, head: int, to: Value) -> _Cells:
    """A block of keys or values as f32, up to a whole number of eights."""
    form = FORMATS[cells.type]
    with c.range(0, (here + 7) // 8 * 8) as i:
        row = cells.base + c.min(first + i, n_kv - 1) * cells.step
        with c.range(0, head, 8) as d:
            c.store(to + (i * head + d) * 4, form.load(c, row, d))
    return _Cells(to, c.i64(4 * head), TensorType.F32, expanded=True)


def _interleave(c: Code, group: _Group, places: Value, queries: Value, head: int) -> None:
    """Copies queries so that eight numbers of one are followed by the same eight of the next."""
    with c.range(group.first, group.stop, 2) as j:
        for s in range(2):
            source = c.load(I64, places + (j + s) * _Place.BYTES + _Place.Q)
            with c.range(0, head, 8) as d:
                c.store(queries + j * (4 * head) + d * 8 + 32 * s, c.load(F32x8, source + d * 4))


def _score(
    c: Code,
    keys: _Cells,
    head: int,
    places: Value,
    interleaved: Value,
    scores: Value,
    j: Value,
    group: _Group,
    k8: Value,
    block: _Block,
    scoring: _Scoring,
) -> None:
    """scores[query][key] of the queries from j on for the eight keys from k8 on."""
    both = group.lanes == 16
    type_ = F32._replace(lanes=group.lanes)
    if both:
        queries = [interleaved + (j + s) * (4 * head) for s in range(0, group.queries, 2)]
    else:
        queries = [c.load(I64, places + (j + s) * _Place.BYTES + _Place.Q) for s in range(group.queries)]
    rows = [keys.row(c, block, k8 + i) for i in range(8)]
    sums = [[c.var(c.const(type_, 0.0)) for _ in rows] for _ in queries]
    with c.range(0, head, 8) as d:
        q = [c.load(type_, query + d * (8 if both else 4)) for query in queries]
        for i, row in enumerate(rows):
            k = FORMATS[keys.type].load(c, row, d)
            if both:
                k = c.concat(k, k)
            for s, numbers in enumerate(q):
                sums[s][i].value = c.fma(numbers, k, sums[s][i].value)
    order = c.const(I64._replace(lanes=8), list(range(8))) + (block.first + k8).splat(8)
    inside = order < block.stop.splat(8)
    for s in range(group.queries):
        if both:
            half = range(8) if s % 2 == 0 else range(8, 16)
            products = [c.shuffle(v.value, None, half) for v in sums[s // 2]]
        else:
            products = [v.value for v in sums[s]]
        score = c.sum_lanes8(products) * scoring.scale.splat(8)
        if scoring.softcap is not None:
            score = maths.tanh(c, score) * scoring.softcap.splat(8)  # `scale` has the division by the cap in it
        if scoring.masked:
            place = places + (j + s) * _Place.BYTES
            mask = c.load(F16x8, c.load(I64, place + _Place.MASK) + (block.first + k8) * 2).to(F32x8)
            if scoring.biased:
                mask = mask * c.splat_load(F32x8, place + _Place.SLOPE)
            score = score + mask
        score = c.select(inside, score, c.const(F32x8, float("-inf")))
        c.store(scores + (j + s) * (4 * BLOCK) + k8 * 4, score)


def _soften(c: Code, scores: Value, here: Value, peak: Value, sums: Value) -> Value:
    """Scores → weights e^(score − maximum); moves the maximum and the sum on; gives what fades the outputs so far."""
    highest = c.var(c.const(F32x8, _NONE))
    with c.range(0, here, 8) as k8:
        highest.value = c.max(c.load(F32x8, scores + k8 * 4), highest.value)
    before = c.load(F32, peak)
    now = c.max(c.max_lanes(highest.value), before)
    fade = maths.exp(c, before - now)
    c.store(peak, now)
    total = c.var(c.load(F32x8, sums) * fade.splat(8))
    with c.range(0, here, 8) as k8:
        weights = maths.exp(c, c.load(F32x8, scores + k8 * 4) - now.splat(8))
        c.store(scores + k8 * 4, weights)
        total.value = total.value + weights
    c.store(sums, total.value)
    return fade


def _mix(
    c: Code,
    values: _Cells,
    head: int,
    d: Value,
    part: tuple[int, int],
    scores: Value,
    outputs: Value,
    fades: Value,
    j: Value,
    step: int,
    block: _Block,
) -> None:
    """outputs = outputs · fade + Σ weight · value, key by key, for a part of the head from element d on."""
    lanes, n = part
    type_, form = F32._replace(lanes=lanes), FORMATS[values.type]
    sums: list[list[Var]] = []
    for s in range(step):
        fade = c.splat_load(type_, fades + (j + s) * 4)
        at = outputs + (j + s) * (4 * head)
        sums.append([c.var(c.load(type_, at + (d + lanes * i) * 4) * fade) for i in range(n)])
    with c.range(0, block.here) as k:
        row = values.row(c, block, k)
        weights = [c.splat_load(type_, scores + (j + s) * (4 * BLOCK) + k * 4) for s in range(step)]
        for i in range(n):
            v = form.load(c, row, d + lanes * i)
            if lanes == 16:
                v = c.concat(v, form.load(c, row, d + (lanes * i + 8)))
            for s in range(step):
                sums[s][i].value = c.fma(weights[s], v, sums[s][i].value)
    for s in range(step):
        for i in range(n):
            c.store(outputs + (j + s) * (4 * head) + (d + lanes * i) * 4, sums[s][i].value)
