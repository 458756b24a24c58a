"""One block of keys against some queries: scores, weights, and the weighted values.

A product q·k is summed in eight lanes (element i in lane i mod 8, in order), and the lanes in one fixed tree. Few
queries read keys in place, eight elements at a time, two keys in a register of 16 lanes. For many queries a block is
transposed first: then a register holds one element of as many keys as it has lanes, the eight lanes of a product are
eight registers, and adding them needs no shuffles. Both compute the same sums.
"""

from __future__ import annotations

from typing import NamedTuple

from llamado.devices.kernels import maths
from llamado.devices.kernels.attention.results import SegmentResult
from llamado.devices.kernels.attention.visible import BLOCK
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.kernels.formats.format import Plain
from llamado.devices.simd import F16, F32, I32, I64, Code, F32x8, I16x8, Type, Value, Var
from llamado.gguf.types import TensorType

_SEVERAL = 3
"""Queries whose sums for eight registers of keys fill all registers."""


class Query:
    """Byte offsets of a query's record: addresses of its numbers, mask row, output, MaskRow and result; the visible
    blocks of the current word; its sink and its slope (f32).
    """

    Q, MASK, OUT, ROW, RESULT, SEES, SINK, SLOPE = 0, 8, 16, 24, 32, 40, 48, 52
    BYTES = 56


class Cells(NamedTuple):
    """Keys or values of a head in the cache: cell i at base + i·step, `head` elements of `type` each."""

    base: Value
    step: int
    type: TensorType
    head: int


class KeyBlock(NamedTuple):
    """A block of keys: its first cell, the number of cells that a query of the tile may see, the cells of the cache,
    and the first cell of the block to prefetch meanwhile.
    """

    first: Value
    here: Value
    n_kv: Value
    ahead: Value


class ScoreSteps(NamedTuple):
    """The steps from a product to a score."""

    scale: Value
    softcap: Value | None
    masked: bool
    biased: bool


class Viewers(NamedTuple):
    """Queries that see a block, from number `first` of a list of their addresses on."""

    list: Value
    first: Value

    def query(self, c: Code, s: int | Value) -> Value:
        return c.load(I64, self.list + (self.first + s) * 8)


def transpose_keys(c: Code, keys: Cells, block: KeyBlock, to: Value, lanes: int) -> None:
    """Store a block of keys as f32, element by element: element d of key i at to + 4·(32·d + i)."""
    lanes = lanes if keys.head % lanes == 0 else 8
    transpose = c.transpose16 if lanes == 16 else c.transpose8
    for k in range(0, BLOCK, lanes):
        rows = [keys.base + c.min(block.first + (k + i), block.n_kv - 1) * keys.step for i in range(lanes)]
        with c.range(0, keys.head, lanes) as d:
            for i, element in enumerate(transpose([_load(c, keys.type, row, d, lanes) for row in rows])):
                c.store(to + (d + i) * (4 * BLOCK) + 4 * k, element)


def expand(c: Code, values: Cells, block: KeyBlock, to: Value) -> Cells:
    """Store a block of values as f32. Cell numbers of the result are those of the cache, within the block."""
    lanes = 16 if values.head % 16 == 0 else 8
    with c.range(0, block.here) as i:
        row = values.base + (block.first + i) * values.step
        with c.range(0, values.head, lanes) as d:
            c.store(to + (i * values.head + d) * 4, _load(c, values.type, row, d, lanes))
    return Cells(to - block.first * (4 * values.head), 4 * values.head, TensorType.F32, values.head)


def _load(c: Code, type_: TensorType, row: Value, d: Value, lanes: int) -> Value:
    """Load eight or 16 elements of a row as f32."""
    form = FORMATS[type_]
    if lanes == 8 or isinstance(form, Plain):
        return form.load(c, row, d, lanes)
    return c.concat(form.load(c, row, d), form.load(c, row, d + 8))


def _load_two(c: Code, type_: TensorType, row: Value, other: Value, d: Value) -> Value:
    """Load eight elements of each of two rows as one register of f32."""
    if type_ is not TensorType.F16:
        return c.concat(_load(c, type_, row, d, 8), _load(c, type_, other, d, 8))
    halves = c.concat(c.load(I16x8, row + d * 2), c.load(I16x8, other + d * 2))
    return halves.bits(F16._replace(lanes=16)).to(Type("f32", 16))  # one conversion instead of two


def _prefetch(c: Code, cells: Cells, cell: Value, d: Value, n: int) -> None:
    """Prefetch `n` elements of a cell from element d on: rows of one head are far apart, which defeats the hardware's
    prefetching. Spread over the loop, prefetches do not delay the loads of current data.
    """
    block_bytes, elements = cells.type.block_bytes, cells.type.block_size
    for byte in range(0, n * block_bytes // elements, 64):
        c.prefetch(cells.base + cell * cells.step + (d * block_bytes // elements + byte), near=False)


def score_transposed(
    c: Code,
    keys: Value,
    head: int,
    chosen: Viewers,
    n: int,
    scores: Value,
    block: KeyBlock,
    scoring: ScoreSteps,
    lanes: int,
) -> None:
    """Compute the scores of `n` queries for a transposed block."""
    queries = [chosen.query(c, s) for s in range(n)]
    at = [c.load(I64, query + Query.Q) for query in queries]
    type_, groups = Type("f32", lanes), 2
    for k in range(0, BLOCK, groups * lanes):
        pairs = []
        for low in (0, 2, 1, 3):  # lanes 0 and 4, 2 and 6, 1 and 5, 3 and 7 are added first
            sums = [[[c.var(c.const(type_, 0.0)) for _ in range(groups)] for _ in at] for _ in range(2)]
            with c.range(0, head, _turns(head)) as d0:
                for half, lane, d in [
                    (half, low + 4 * half, d0 + e) for e in range(0, _turns(head), 8) for half in (0, 1)
                ]:
                    key = [c.load(type_, keys + (d + lane) * (4 * BLOCK) + 4 * (k + lanes * g)) for g in range(groups)]
                    for s, q in enumerate(at):
                        element = c.splat_load(type_, q + (d + lane) * 4)
                        for g in range(groups):
                            sums[half][s][g].value = c.fma(element, key[g], sums[half][s][g].value)
            pairs.append(_added(_values(sums[0]), _values(sums[1])))
        products = _added(_added(pairs[0], pairs[1]), _added(pairs[2], pairs[3]))
        for s, query in enumerate(queries):
            for g in range(groups):
                key_ = c.i64(k + lanes * g)
                _keep(c, products[s][g], query, scores + (chosen.first + s) * (4 * BLOCK), key_, block, scoring)


def _turns(head: int, most: int = 16) -> int:
    """Elements of a head per loop iteration: branch prediction misses the ends of short loops too often."""
    return next(n for n in range(min(most, head), 0, -8) if head % n == 0)


def _values(sums: list[list[Var]]) -> list[list[Value]]:
    return [[v.value for v in row] for row in sums]


def _added(a: list[list[Value]], b: list[list[Value]]) -> list[list[Value]]:
    return [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def score_in_place(
    c: Code, keys: Cells, chosen: Viewers, n: int, scores: Value, block: KeyBlock, scoring: ScoreSteps, lanes: int
) -> None:
    """Compute the scores of `n` queries for a block that is entirely in the cache, read in place."""
    queries = [chosen.query(c, s) for s in range(n)]
    at = [c.load(I64, query + Query.Q) for query in queries]
    type_, turn = Type("f32", lanes), _turns(keys.head, 32 if n <= _SEVERAL else 16)  # longer bodies take fewer turns
    with c.range(0, BLOCK, lanes) as k:
        row = keys.base + (block.first + k) * keys.step
        products: list[list[Value]] = [[] for _ in at]
        together = 8 if n <= _SEVERAL else 4  # as many keys as leave registers for the sums of all queries
        for first in range(0, 8, together):
            sums = [[c.var(c.const(type_, 0.0)) for _ in range(together)] for _ in at]
            with c.range(0, keys.head, turn) as d0:
                for step, d in enumerate(d0 + e for e in range(0, turn, 8)):
                    q = [c.load(F32x8, a + d * 4) for a in at]
                    q = [c.concat(v, v) for v in q] if lanes == 16 else q
                    for i in range(together):
                        own = row + (first + i) * keys.step
                        if lanes == 16:
                            key = _load_two(c, keys.type, own, own + 8 * keys.step, d)
                        else:
                            key = _load(c, keys.type, own, d, 8)
                        for s in range(n):
                            sums[s][i].value = c.fma(q[s], key, sums[s][i].value)
                        if i * (turn // 8) // together == step:  # spread evenly: memory takes a few requests at a time
                            for half in range(0, lanes, 8):
                                _prefetch(c, keys, block.ahead + (k + first + i + half), d0, turn)
            for s in range(n):
                products[s] += [v.value for v in sums[s]]
        for s, query in enumerate(queries):
            product = c.sum_lanes8(products[s])
            _keep(c, product, query, scores + (chosen.first + s) * (4 * BLOCK), k, block, scoring)


def _keep(c: Code, product: Value, query: Value, scores: Value, k: Value, block: KeyBlock, scoring: ScoreSteps) -> None:
    """Store the scores of the block's keys from `k` on."""
    lanes = product.type.lanes
    inside = c.const(I32._replace(lanes=lanes), list(range(lanes))) < (block.here - k).to(I32).splat(lanes)
    score = product * scoring.scale.splat(lanes)
    if scoring.softcap is not None:
        score = maths.tanh(c, score) * scoring.softcap.splat(lanes)  # `scale` includes the division by the cap
    if scoring.masked:
        mask = c.load(F16._replace(lanes=lanes), c.load(I64, query + Query.MASK) + (block.first + k) * 2)
        weight = mask.to(product.type)
        inside = inside & (weight > float("-inf"))  # hides any content of an unseen key, NaN as well
        if scoring.biased:
            weight = weight * c.splat_load(product.type, query + Query.SLOPE)
        score = score + weight
    c.store(scores + k * 4, c.select(inside, score, c.const(product.type, float("-inf"))))


def update_softmax(c: Code, chosen: Viewers, n: int, scores: Value, fades: Value, lanes: int) -> None:
    """Convert scores of up to four queries to weights e^(score − maximum) and update their maxima and sums. `fades`:
    receives the factors of their outputs so far.
    """
    type_ = Type("f32", lanes)
    queries = [chosen.query(c, min(s, n - 1)) for s in range(4)]
    results = [c.load(I64, query + Query.RESULT) for query in queries]
    at = [scores + (chosen.first + s) * (4 * BLOCK) for s in range(n)]
    held = [[c.load(type_, a + 4 * k) for k in range(0, BLOCK, lanes)] for a in at]
    highest = []
    for row in held:
        high = c.const(type_, -1e30)
        for score in row:
            high = c.max(score, high)
        highest.append(c.max_lanes(high))
    before = c.gather(F32, [result + SegmentResult.PEAK for result in results])
    now = c.max(c.vector([highest[min(s, n - 1)] for s in range(4)]), before)
    fade = maths.exp(c, before - now)
    for s in range(n):
        c.store(results[s] + SegmentResult.PEAK, now.lane(s))
        c.store(fades + (chosen.first + s) * 4, fade.lane(s))
        total = c.load(F32x8, results[s] + SegmentResult.SUMS) * fade.lane(s).splat(8)
        for i, score in enumerate(held[s]):
            weights = maths.exp(c, score - now.lane(s).splat(lanes))
            c.store(at[s] + i * (4 * lanes), weights)
            for half in range(0, lanes, 8):
                total = total + (weights if lanes == 8 else c.shuffle(weights, None, range(half, half + 8)))
        c.store(results[s] + SegmentResult.SUMS, total)


def add_values(
    c: Code, values: Cells, chosen: Viewers, n: int, scores: Value, fades: Value, block: KeyBlock, lanes: int,
    start: Value, n_registers: int, *, fetch: bool,
) -> None:  # fmt: skip
    """outputs = outputs · fade + Σ weight · value, key by key, for `n_registers` registers from element `start` on.
    `fetch`: prefetch the same part of the next block.

    The value of an unseen key may be NaN, and 0 · NaN is not 0. A NaN shows in the sums, which are then computed again
    without keys of weight 0, so the usual case needs no check per key.
    """
    type_ = Type("f32", lanes)
    outputs = [c.load(I64, chosen.query(c, s) + Query.RESULT) + (start * 4 + SegmentResult.OUTPUTS) for s in range(n)]
    weights = [scores + (chosen.first + s) * (4 * BLOCK) for s in range(n)]
    sums: list[list[Var]] = []
    for s, at in enumerate(outputs):
        fade = c.splat_load(type_, fades + (chosen.first + s) * 4)
        sums.append([c.var(c.load(type_, at + 4 * lanes * i) * fade) for i in range(n_registers)])
    row = values.base + block.first * values.step
    with c.range(0, block.here) as k:
        weight = [c.splat_load(type_, at + k * 4) for at in weights]
        for i in range(n_registers):
            value = _load(c, values.type, row + k * values.step, start + lanes * i, lanes)
            for s in range(n):
                sums[s][i].value = c.fma(weight[s], value, sums[s][i].value)
        if fetch:
            _prefetch(c, values, block.ahead + k, start, lanes * n_registers)
    finite = _finite(c, [total.value for row_ in sums for total in row_])
    with c.when(finite):
        for at, row_ in zip(outputs, sums, strict=True):
            for i, total in enumerate(row_):
                c.store(at + 4 * lanes * i, total.value)
    with c.when(finite ^ 1), c.range(0, n) as number:
        query = chosen.first + number
        fade = c.load(F32, fades + query * 4).splat(lanes)
        to = c.load(I64, chosen.query(c, number) + Query.RESULT) + (start * 4 + SegmentResult.OUTPUTS)
        with c.range(0, 4 * lanes * n_registers, 4 * lanes) as offset:
            c.store(to + offset, c.load(type_, to + offset) * fade)
        with c.range(0, block.here) as k:
            own = c.load(F32, scores + query * (4 * BLOCK) + k * 4)
            with c.when(own.equals(0.0) ^ 1), c.range(0, n_registers) as register:
                value = _load(c, values.type, row + k * values.step, start + register * lanes, lanes)
                out = to + register * (4 * lanes)
                c.store(out, c.fma(own.splat(lanes), value, c.load(type_, out)))


def _finite(c: Code, registers: list[Value]) -> Value:
    """Return true if all lanes are finite, and their sums, too."""
    while len(registers) > 1:
        pairs = zip(registers[::2], registers[1::2], strict=False)
        registers = [a + b for a, b in pairs] + registers[len(registers) & -2 :]
    (total,) = registers
    lanes = (total * 0.0).equals(0.0)
    return lanes.bits(Type(f"i{total.type.lanes}")).equals(-1)
