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
    "mask", "mask_token", "mask_stream", "ranges", "ranges_stream",
    "out", "out_head", "out_token", "out_stream",
    "n_tokens", "n_heads_kv", "n_streams", "group", "n_kv", "scale", "softcap", "scratch", "scratch_step",
)  # fmt: skip


def scratch_bytes(head_k: int, head_v: int, tile: int) -> int:
    """Scratch one thread needs: outputs and scores of a tile, a block of keys and of values in f32."""
    return 4 * (tile * (head_v + BLOCK) + BLOCK * (head_k + head_v)) + 64


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
    masked: bool,
    capped: bool,
) -> None:
    """One unit of work is a tile of `tile` queries (token and head of one key head's group, heads fastest) of
    one key head.
    """
    k_type, v_type = TensorType[keys], TensorType[values]
    scale, softcap = a.scale.to(I32).bits(F32), a.softcap.to(I32).bits(F32)
    rows = a.n_tokens * a.group
    tiles = (rows + (tile - 1)) // tile
    outputs = a.scratch + work.thread * a.scratch_step
    scores = outputs + 4 * tile * head_v
    k_block = scores + 4 * tile * BLOCK
    v_block = k_block + 4 * BLOCK * head_k
    step = 2 if c.lowering.columns > 4 and tile % 2 == 0 else 1  # queries handled at once: what the registers hold

    with c.shares(work, tiles * a.n_heads_kv * a.n_streams, c.i64(1)) as unit:
        # the longest tiles (the last tokens see most keys) are handed out first
        number = tiles - 1 - unit // (a.n_heads_kv * a.n_streams)
        rest = unit % (a.n_heads_kv * a.n_streams)
        head, stream = rest % a.n_heads_kv, rest // a.n_heads_kv
        places = c.scratch(8 * 4 * tile)  # per query: addresses of q, mask and output, first and last + 1 cell it sees
        peaks, sums = c.scratch(4 * tile), c.scratch(32 * tile)
        start, stop = c.var(a.n_kv), c.var(c.i64(0))
        with c.range(0, tile) as j:
            row = c.min(number * tile + j, rows - 1)
            token, h = row // a.group, head * a.group + row % a.group
            c.store(places + j * 32, a.q + token * a.q_token + h * a.q_head + stream * a.q_stream)
            c.store(places + j * 32 + 8, a.mask + token * a.mask_token + stream * a.mask_stream)
            c.store(places + j * 32 + 16, a.out + h * a.out_head + token * a.out_token + stream * a.out_stream)
            c.store(peaks + j * 4, c.f32(_NONE))
            c.store(sums + j * 32, c.const(F32x8, 0.0))
            if masked:
                range_ = a.ranges + token * 8 + stream * a.ranges_stream
                c.store(places + j * 32 + 24, c.load(I64, range_))
                start.value = c.min(start.value, c.load(I32, range_).to(I64))
                stop.value = c.max(stop.value, c.load(I32, range_ + 4).to(I64))
        if not masked:
            start.value, stop.value = c.i64(0), a.n_kv
        with c.range(0, tile * head_v, 8) as i:
            c.store(outputs + i * 4, c.const(F32x8, 0.0))

        k_head = a.k + head * a.k_head + stream * a.k_stream
        v_head = a.v + head * a.v_head + stream * a.v_stream
        caches = ((_Cells(k_head, a.k_cell, k_type), head_k), (_Cells(v_head, a.v_cell, v_type), head_v))
        if tile <= 2:  # weights have passed through all caches since these cells were last read
            for cells, head_size in caches:
                _fetch(c, cells, start.value, c.min(start.value + _AHEAD, stop.value), head_size)
        with c.range(start.value // BLOCK * BLOCK, stop.value, BLOCK) as first:
            here = c.min(stop.value - first, BLOCK)
            if tile <= 2:
                for cells, head_size in caches:
                    _fetch(c, cells, first + _AHEAD, c.min(first + (_AHEAD + BLOCK), stop.value), head_size)
            wanted = c.var(c.i64(0 if masked else 1))
            if masked:
                with c.range(0, tile) as j:
                    wanted.value = wanted.value | _sees(c, places + j * 32, first)
            with c.when(wanted.value > 0):
                keys_, values_ = _Cells(k_head, a.k_cell, k_type), _Cells(v_head, a.v_cell, v_type)
                if tile > 2:
                    keys_ = _expand(c, keys_, first, here, a.n_kv, head_k, k_block)
                    values_ = _expand(c, values_, first, here, a.n_kv, head_v, v_block)
                block, cap = _Block(first, here, stop.value, a.n_kv), softcap if capped else None

                def attend(
                    j: Value, n: int, cells: tuple[_Cells, _Cells] = (keys_, values_), block: _Block = block
                ) -> None:
                    """Queries j … j+n−1 over the block."""
                    at = scores + j * (4 * BLOCK)
                    _score(c, cells[0], head_k, places + j * 32, at, n, block, scale, cap, masked=masked)
                    fades = [
                        _soften(c, at + s * (4 * BLOCK), here, peaks + (j + s) * 4, sums + (j + s) * 32)
                        for s in range(n)
                    ]
                    _mix(c, cells[1], head_v, at, outputs + j * (4 * head_v), n, block, fades)

                with c.range(0, tile, step) as j:
                    seen = c.i64(0 if masked else step)
                    for s in range(step if masked else 0):
                        seen = seen + _sees(c, places + (j + s) * 32, first)
                    with c.when(seen.equals(step)):
                        attend(j, step)
                    if masked and step > 1:  # two sequences meet: what one of them does not see may be no number
                        with (
                            c.when(seen.equals(1)),
                            c.range(j, j + step) as one,
                            c.when(_sees(c, places + one * 32, first) > 0),
                        ):
                            attend(one, 1)

        with c.range(0, tile) as j:
            total = c.sum_lanes(c.load(F32x8, sums + j * 32))
            inverse = c.select(total > 0.0, c.f32(1.0) / total, c.f32(0.0)).splat(8)
            to = c.load(I64, places + j * 32 + 16)
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


def _sees(c: Code, place: Value, first: Value) -> Value:
    """1 where the query at `place` sees a cell of the block at `first`, else 0."""
    low, high = c.load(I32, place + 24).to(I64), c.load(I32, place + 28).to(I64)
    return ((low < first + BLOCK) & (high > first)).zext(I64)


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


def _score(
    c: Code,
    keys: _Cells,
    head: int,
    places: Value,
    scores: Value,
    step: int,
    block: _Block,
    scale: Value,
    softcap: Value | None,
    *,
    masked: bool,
) -> None:
    """scores[query][key] of `step` queries for the keys of a block, eight at a time."""
    queries = [c.load(I64, places + 32 * s) for s in range(step)]
    with c.range(0, block.here, 8) as k8:
        rows = [keys.row(c, block, k8 + i) for i in range(8)]
        sums = [[c.var(c.const(F32x8, 0.0)) for _ in range(8)] for _ in range(step)]
        with c.range(0, head, 8) as d:
            q = [c.load(F32x8, query + d * 4) for query in queries]
            for i, row in enumerate(rows):
                k = FORMATS[keys.type].load(c, row, d)
                for s in range(step):
                    sums[s][i].value = c.fma(q[s], k, sums[s][i].value)
        order = c.const(I64._replace(lanes=8), list(range(8))) + (block.first + k8).splat(8)
        for s in range(step):
            score = c.sum_lanes8([v.value for v in sums[s]]) * scale.splat(8)
            if softcap is not None:
                score = maths.tanh(c, score) * softcap.splat(8)  # `scale` has the division by the cap in it
            if masked:
                mask = c.load(I64, places + 32 * s + 8)
                score = score + c.load(F16x8, mask + (block.first + k8) * 2).to(F32x8)
            score = c.select(order < block.stop.splat(8), score, c.const(F32x8, float("-inf")))
            c.store(scores + 4 * BLOCK * s + k8 * 4, score)


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
    c: Code, values: _Cells, head: int, scores: Value, out: Value, step: int, block: _Block, fades: list[Value]
) -> None:
    """outputs = outputs · fade + Σ weight · value, key by key, in tiles of eight vectors of the head."""
    n = min(8, head // 8)
    while (head // 8) % n:
        n -= 1
    with c.range(0, head, 8 * n) as d:
        sums: list[list[Var]] = []
        for s in range(step):
            fade = fades[s].splat(8)
            at = out + s * (4 * head)
            sums.append([c.var(c.load(F32x8, at + (d + 8 * i) * 4) * fade) for i in range(n)])
        with c.range(0, block.here) as k:
            row = values.row(c, block, k)
            weights = [c.splat_load(F32x8, scores + 4 * BLOCK * s + k * 4) for s in range(step)]
            for i in range(n):
                v = FORMATS[values.type].load(c, row, d + 8 * i)
                for s in range(step):
                    sums[s][i].value = c.fma(weights[s], v, sums[s][i].value)
        for s in range(step):
            for i in range(n):
                c.store(out + s * (4 * head) + (d + 8 * i) * 4, sums[s][i].value)
