"""Flash attention: softmax(q·kᵀ·scale + mask)·v with a running maximum, over key blocks of one fixed size in order.

A query's result depends only on its own visible keys. Blocks start at multiples of `BLOCK` cells; dot products run over
lanes of the head in one fixed tree; values are added key by key; every `SEGMENT` blocks that a query sees form a
segment with a result of its own, and segment results are added in order. So one query alone, a tile of many, and
segments computed separately give the same bits, and blocks that a query does not see are skipped.

Source of the method: Dao et al., FlashAttention (2022), online softmax of Milakov & Gimelshein (2018); segments as in
Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from llamado.devices.kernel import kernel
from llamado.devices.kernels.attention import results
from llamado.devices.kernels.attention.blocks import (
    Cells,
    KeyBlock,
    Query,
    ScoreSteps,
    Viewers,
    add_values,
    expand,
    score_in_place,
    score_transposed,
    transpose_keys,
    update_softmax,
)
from llamado.devices.kernels.attention.results import SegmentResult
from llamado.devices.kernels.attention.visible import BLOCK, WORD, MaskRow, Tile, below
from llamado.devices.simd import F32, I32, I64, Code, Value, Work
from llamado.gguf.types import TensorType

_AHEAD = 4 * BLOCK
"""Cells between the current block and the keys and values that are prefetched."""

_FIELDS = (
    "q", "q_token", "q_head", "q_stream", "k", "k_head", "k_stream", "v", "v_head", "v_stream",
    "mask", "mask_token", "mask_head", "mask_stream", "rows", "row_token", "row_head", "row_stream", "n_words", "tiles",
    "sinks", "slopes", "partials", "out", "out_head", "out_token", "out_stream",
    "n_tokens", "n_heads_kv", "group", "n_kv", "scale", "softcap", "scratch", "scratch_step",
)  # fmt: skip

_FOUR = 4
"""Queries that are processed together if there are many."""


def scratch_bytes(head_k: int, head_v: int, most: int) -> int:
    """Scratch bytes of one thread: two results for each query of a tile (and one for a padding query), a block of keys
    and of values in f32, and the weights of all queries for a block.
    """
    return (most + 1) * 2 * SegmentResult.bytes(head_v) + 4 * BLOCK * (head_k + head_v + most + _FOUR)


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
    k_cell: int,
    v_cell: int,
    most: int,
    few: int,
    lanes: int,
    divided: bool,
    masked: bool,
    capped: bool,
    sinks: bool,
    biased: bool,
    shared: bool,
) -> None:
    """Compute one tile per unit of work: queries of neighboring tokens (`visible.find_tiles`), of the heads of one key
    head or, block by block, of several: cells are rows of all key heads, which memory reads faster in sequence.

    `most`: queries of a tile. Blocks that at most `few` of them see are read in place. `lanes`, 8 or 16: numbers of a
    register. `divided`: a unit is one segment, whose result goes to `partials`. `sinks`: each head has one more key, a
    score without a value. `biased`: each head weighs the mask by its slope. `shared`: values are the beginnings of the
    keys' rows.
    """
    size = SegmentResult.bytes(head_v)
    k_block = a.scratch + work.thread * a.scratch_step
    v_block = k_block + 4 * BLOCK * head_k
    scores = v_block + 4 * BLOCK * head_v
    own = scores + 4 * BLOCK * (most + _FOUR)
    scoring = ScoreSteps(a.scale.to(I32).bits(F32), a.softcap.to(I32).bits(F32) if capped else None, masked, biased)
    n_tiles = c.load(I64, a.tiles + Tile.COUNT)
    n_heads = c.max(c.load(I64, a.tiles + Tile.HEADS), c.i64(1))  # 0 in an abandoned program
    pieces = (a.group + n_heads - 1) // n_heads
    together = c.max(c.load(I64, a.tiles + Tile.KEY_HEADS), c.i64(1))
    sets = (a.n_heads_kv + together - 1) // together
    table, all_queries = c.scratch(Query.BYTES * (most + 1)), c.scratch(8 * _FOUR * most)
    some, fades = c.scratch(8 * (most + _FOUR)), c.scratch(4 * (most + _FOUR))

    with c.shares(work, n_tiles * sets * pieces, c.i64(1)) as unit:
        # the longest tiles (the last tokens see most keys) are handed out first
        tile = a.tiles + Tile.LIST + (n_tiles - 1 - unit // (sets * pieces)) * Tile.BYTES
        first_key_head, piece = unit % (sets * pieces) // pieces * together, unit % pieces
        key_heads = c.min(together, a.n_heads_kv - first_key_head)
        stream, segment0 = c.load(I64, tile + Tile.STREAM), c.load(I64, tile + Tile.START)
        heads = c.min(n_heads, a.group - piece * n_heads)
        tokens = c.load(I64, tile + Tile.TOKENS)
        count = tokens * heads  # queries of a key head
        listed = (count + (_FOUR - 1)) * 8
        stop = c.var(c.i64(0))
        with c.range(0, key_heads) as g, c.range(0, tokens) as t, c.range(0, heads) as i:
            j, token = t * heads + i, c.load(I64, tile + Tile.FIRST) + t
            h = (first_key_head + g) * a.group + piece * n_heads + i
            query = table + (g * count + j) * Query.BYTES
            c.store(all_queries + g * listed + j * 8, query)
            c.store(query + Query.Q, a.q + token * a.q_token + h * a.q_head + stream * a.q_stream)
            mask = a.mask + token * a.mask_token + h * a.mask_head + stream * a.mask_stream
            c.store(query + Query.MASK, mask)
            c.store(query + Query.OUT, a.out + h * a.out_head + token * a.out_token + stream * a.out_stream)
            row = a.rows + token * a.row_token + h * a.row_head + stream * a.row_stream
            c.store(query + Query.ROW, row)
            if divided:
                number = (stream * a.n_tokens + token) * (a.n_heads_kv * a.group) + h
                c.store(query + Query.RESULT, a.partials + (number * a.n_words + segment0) * size)
            if sinks:
                c.store(query + Query.SINK, c.load(F32, a.sinks + h * 4))
            if biased:
                c.store(query + Query.SLOPE, c.load(F32, a.slopes + h * 4))
            stop.value = c.max(stop.value, c.load(I32, row + MaskRow.LAST).to(I64))
        # groups of four are padded with a query whose result is unused
        padding = table + most * Query.BYTES
        c.store(padding + Query.Q, c.load(I64, table + Query.Q))
        c.store(padding + Query.MASK, c.load(I64, table + Query.MASK))
        c.store(padding + Query.RESULT, own + 2 * most * size)
        if biased:
            c.store(padding + Query.SLOPE, c.f32(0.0))
        results.clear(c, own + 2 * most * size, head_v)
        with c.range(0, key_heads) as g:
            _fill_up(c, all_queries + g * listed, count, padding)

        with c.range(segment0, c.load(I64, tile + Tile.STOP)) as segment:
            start, end = c.var(c.i64(1 << 40)), c.var(c.i64(0))
            with c.range(0, key_heads * count) as j:
                query = table + j * Query.BYTES
                if not divided:  # the result of the first segment, to which all others are added
                    further = c.min(segment, c.i64(1)) * size
                    c.store(query + Query.RESULT, own + j * (2 * size) + further)
                results.clear(c, c.load(I64, query + Query.RESULT), head_v)
                bounds, has = _bounds(c, query, segment, a.n_words)
                with c.when(has):
                    start.value = c.min(start.value, bounds[0])
                    end.value = c.max(end.value, bounds[1])
            with c.range(start.value // WORD, (end.value + (WORD - 1)) // WORD) as word:
                all_, any_ = c.var(c.i64(-1)), c.var(c.i64(0))
                with c.range(0, key_heads * count) as j:
                    query = table + j * Query.BYTES
                    bounds, has = _bounds(c, query, segment, a.n_words)
                    inside = below(c, bounds[1] - word * WORD) & (below(c, bounds[0] - word * WORD) ^ -1)
                    bits = c.load(I64, c.load(I64, query + Query.ROW) + MaskRow.BITS + word * 8) & inside
                    bits = c.select(has, bits, c.i64(0))
                    c.store(query + Query.SEES, bits)
                    all_.value, any_.value = all_.value & bits, any_.value | bits
                with c.loop() as blocks:
                    c.leave(blocks, any_.value.equals(0))
                    number = c.lowest_one(any_.value)
                    any_.value = any_.value & (any_.value - 1)
                    first = (word * WORD + number) * BLOCK
                    if masked:  # rows of a mask are far apart, too
                        with c.range(0, tokens) as t:
                            mask = c.load(I64, table + t * heads * Query.BYTES + Query.MASK)
                            c.prefetch(mask + (first + _AHEAD) * 2, near=False)
                    # past the end, prefetch this block again
                    ahead = c.select(first + _AHEAD < stop.value, first + _AHEAD, first)
                    block = KeyBlock(first, c.min(stop.value - first, BLOCK), a.n_kv, ahead)
                    with c.range(0, key_heads) as g:
                        head = first_key_head + g
                        keys_ = Cells(a.k + head * a.k_head + stream * a.k_stream, k_cell, TensorType[keys], head_k)
                        values_ = Cells(a.v + head * a.v_head + stream * a.v_stream, v_cell, TensorType[values], head_v)
                        list_, n = c.var(all_queries + g * listed), c.var(count)
                        with c.when((all_.value >> number & 1).equals(0)):
                            n.value = _choose(c, table + g * count * Query.BYTES, count, number, some)
                            _fill_up(c, some, n.value, padding)
                            list_.value = some
                        here = (n.value <= few) & (first + BLOCK <= a.n_kv)
                        with c.when(here):
                            _few(
                                c, keys_, values_, list_.value, n.value, scores, fades, block, scoring, lanes,
                                shared=shared,
                            )  # fmt: skip
                        with c.when(here ^ 1):
                            for cells in (keys_,) if shared else (keys_, values_):
                                _fetch(c, cells, first + _AHEAD, c.min(first + (_AHEAD + BLOCK), stop.value))
                            transpose_keys(c, keys_, block, k_block, lanes)
                            _many(
                                c, k_block, head_k, expand(c, values_, block, v_block), list_.value, n.value, scores,
                                fades, block, scoring, lanes,
                            )  # fmt: skip
            if not divided:
                with c.when(segment > 0), c.range(0, key_heads * count) as j:
                    _, has = _bounds(c, table + j * Query.BYTES, segment, a.n_words)
                    with c.when(has):
                        results.add(c, own + j * (2 * size), own + j * (2 * size) + size, head_v)
        if not divided:
            with c.range(0, key_heads * count) as j:
                query = table + j * Query.BYTES
                sink = c.load(F32, query + Query.SINK) if sinks else None
                results.finish(c, own + j * (2 * size), sink, c.load(I64, query + Query.OUT), head_v)


def _bounds(c: Code, query: Value, segment: Value, n_words: Value) -> tuple[tuple[Value, Value], Value]:
    """Return the first block of a query's segment and the last one + 1, and whether it has that segment."""
    row = c.load(I64, query + Query.ROW)
    at = MaskRow.starts(row, n_words) + segment * 4
    has = segment < c.load(I32, row + MaskRow.SEGMENTS).to(I64)
    return (c.load(I32, at).to(I64), c.load(I32, at + 4).to(I64)), has


def _fill_up(c: Code, list_: Value, n: Value, padding: Value) -> None:
    for i in range(_FOUR - 1):
        c.store(list_ + (n + i) * 8, padding)


def _choose(c: Code, table: Value, count: Value, number: Value, to: Value) -> Value:
    """List the queries that see block `number` of the current word; return their number."""
    n = c.var(c.i64(0))
    with c.range(0, count) as j:
        query = table + j * Query.BYTES
        c.store(to + n.value * 8, query)
        n.value = n.value + (c.load(I64, query + Query.SEES) >> number & 1)
    return n.value


def _fetch(c: Code, cells: Cells, first: Value, stop: Value) -> None:
    """Prefetch cells: the rows of one head are far apart, which defeats the hardware's prefetching."""
    with c.range(first, stop) as i:
        for byte in range(0, cells.type.row_bytes(cells.head), 64):
            c.prefetch(cells.base + i * cells.step + byte, near=False)


def _few(
    c: Code, keys: Cells, values: Cells, list_: Value, n: Value, scores: Value, fades: Value, block: KeyBlock,
    scoring: ScoreSteps, lanes: int, *, shared: bool,
) -> None:  # fmt: skip
    """Process a block that few queries see: as many of them at a time as fit the registers."""
    done = c.var(c.i64(0))
    for many in (6, 4, 3, 2, 1) if lanes == 16 else (1,):
        stop = n - (n - done.value) % many
        with c.when(done.value < stop):
            c.call(
                _in_groups, keys, values, list_, done.value, stop, scores, fades, block, scoring, lanes, many=many,
                shared=shared,
            )  # fmt: skip
            done.value = stop


def _in_groups(
    c: Code, keys: Cells, values: Cells, list_: Value, start: Value, stop: Value, scores: Value, fades: Value,
    block: KeyBlock, scoring: ScoreSteps, lanes: int, *, many: int, shared: bool,
) -> None:  # fmt: skip
    """Process a block for the queries from `start` to `stop`, `many` of them at a time."""
    with c.range(start, stop, many) as done:
        chosen = Viewers(list_, done)
        asking = block._replace(ahead=c.select(done.equals(0), block.ahead, block.first))
        score_in_place(c, keys, chosen, many, scores, asking, scoring, lanes)
        for first in range(0, many, _FOUR):
            update_softmax(c, Viewers(list_, done + first), min(_FOUR, many - first), scores, fades, lanes)
        for part in _parts(values.head, lanes, 4):
            wide, n_registers = part.lanes, part.n_registers
            with c.range(part.start, part.stop, wide * n_registers) as element:
                add_values(c, values, chosen, many, scores, fades, asking, wide, element, n_registers, fetch=not shared)


def _many(
    c: Code, keys: Value, head_k: int, values: Cells, list_: Value, n: Value, scores: Value, fades: Value,
    block: KeyBlock, scoring: ScoreSteps, lanes: int,
) -> None:  # fmt: skip
    """Process an expanded block that many queries see: its keys, and then a part of all values, stay in L1 for all of
    them.
    """
    c.call(_score_all, keys, head_k, list_, n, scores, block, scoring, lanes)
    c.call(_weigh_all, list_, n, scores, fades, lanes)
    for part in _parts(values.head, lanes, 5 if lanes == 16 else 4):
        c.call(_add_all, values, list_, n, scores, fades, block, part, lanes)


def _score_all(
    c: Code, keys: Value, head_k: int, list_: Value, n: Value, scores: Value, block: KeyBlock, scoring: ScoreSteps,
    lanes: int,
) -> None:  # fmt: skip
    at_once = _FOUR if lanes == 16 else 2
    with c.range(0, n, at_once) as j:
        score_transposed(c, keys, head_k, Viewers(list_, j), at_once, scores, block, scoring, lanes)


def _weigh_all(c: Code, list_: Value, n: Value, scores: Value, fades: Value, lanes: int) -> None:
    with c.range(0, n, _FOUR) as j:
        update_softmax(c, Viewers(list_, j), _FOUR, scores, fades, lanes)


def _add_all(
    c: Code, values: Cells, list_: Value, n: Value, scores: Value, fades: Value, block: KeyBlock, part: _Part,
    lanes: int,
) -> None:  # fmt: skip
    at_once = _FOUR if lanes == 16 else 2
    wide, n_registers = part.lanes, part.n_registers
    with c.range(part.start, part.stop, wide * n_registers) as start, c.range(0, n, at_once) as j:
        add_values(c, values, Viewers(list_, j), at_once, scores, fades, block, wide, start, n_registers, fetch=False)


class _Part(NamedTuple):
    """Elements of a head from `start` to `stop`, as registers of `lanes`, of which `n_registers` are filled at once."""

    start: int
    stop: int
    lanes: int
    n_registers: int


def _parts(head: int, lanes: int, most: int) -> list[_Part]:
    """Divide a head of values in parts that fill at most `most` registers at once, few of them if possible."""
    if head < lanes:
        lanes = 8
    whole = head // lanes
    found = []
    if n := next((n for n in (4, 5, 3) if n <= most and whole % n == 0), 0):
        found = [_Part(0, whole * lanes, lanes, n)]
    else:
        at, n_groups = 0, -(-whole // most)
        for i in range(n_groups):
            n = (whole - at) // (n_groups - i)
            found.append(_Part(at * lanes, (at + n) * lanes, lanes, n))
            at += n
    if rest := head % lanes:
        found.append(_Part(whole * lanes, head, 8, rest // 8))
    return found
