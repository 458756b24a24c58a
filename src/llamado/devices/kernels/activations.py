"""Quantized activations: the int8 columns that the matmul kernels multiply weights with.

Columns form groups of `columns`, interleaved run by run so that a group is one stream. A matrix of n columns is whole
groups of `Lowering.columns`, and a last group of 4 if the rest fits it (padding columns have undefined contents). A run
has `Lowering.run` bytes of a column, 4 or 8. Per block and group of n columns:

blocks of 32 (44 bytes a column):   32 × n int8 in runs | n × f32 d | n × f32 d·Σq | n × i32 −Σq
blocks of 256 (308 bytes a column): 256 × n int8 in runs | n × f32 d | 4 × n × pairs of i16 sums of 32
                                    | 8 × n × pairs of i16 sums of 16

Columns in units, for devices that copy memory in pieces of 16 bytes: each column apart, 336 bytes for 256 values. The
last unit of a column is incomplete if its length is not a multiple of 256. Sixteen bytes of eight units, or four of
eight columns, lie in different banks of a GPU's shared memory.

blocks of 32:  256 int8 | 8 × f32 d | 8 × f32 d·Σq | 8 × i16 −Σq
blocks of 256: 256 int8 | 8 pairs of i16 sums of 16 | 4 pairs of i16 sums of 32 | f32 d | 28 bytes unused

Columns in tiles, for `tiles/`: groups of TILE, with RUN adjacent int8 of each column, which are a row of a tile.

Here q = round(x · 127 / max|x|) and d = max|x| / 127: the values of ggml's Q8_0, Q8_1 and Q8_K (ggml-quants.c), with
the scales of the blocks of 32 rounded through f16 like ggml's. Sums are stored in the pairs in which the formats read
mins and scales: (0, 2), (1, 3), (4, 6), ….
"""

from __future__ import annotations

from collections.abc import Callable

from llamado.devices.simd import F16, F32, I16, I32, Code, F32x8, I32x8, Type, Value

_F32x32, _I32x32 = Type("f32", 32), Type("i32", 32)

BYTES_PER_COLUMN = {32: 44, 256: 308}

TILE = 16
"""Columns of a tile, and rows of weights."""
RUN = {32: 32, 256: 64}
"""Bytes of a column that are adjacent in tiles."""

# offsets of the parts in a block of a group of n columns, in units of n bytes
D, D_SUM, MINUS_SUM = 32, 36, 40
D_256, SUMS_OF_32, SUMS_OF_16 = 256, 260, 276

UNIT, UNIT_BYTES = 256, 336
"""Values of a unit, and its bytes."""

# offsets of the parts of a unit: of the first block of 32, or of the block of 256
UNIT_D, UNIT_D_SUM, UNIT_MINUS_SUM = 256, 288, 320
UNIT_SUMS_OF_16, UNIT_SUMS_OF_32, UNIT_D_256 = 256, 288, 304


def units_bytes(n: int) -> int:
    """Bytes of a column of n values in units."""
    return -(-n // UNIT) * UNIT_BYTES


def quantized_bytes(block: int, n: int, columns: int, group: int) -> int:
    """Bytes of `columns` quantized columns of n values, padded to whole groups."""
    whole, rest = divmod(columns, group)
    padded = columns if columns <= group else whole * group + (0 if rest == 0 else 4 if rest <= 4 else group)
    if group == TILE:
        padded = -(-columns // TILE) * TILE
    return n // block * BYTES_PER_COLUMN[block] * padded


def quantize_row(
    c: Code, source: Value, n: Value, target: Value, column: Value, columns: Value, *, block: int, run: int = 4
) -> None:
    """Quantize n f32 at `source` into place `column` of a group of `columns` columns at `target` (column, columns:
    I64), of which `run` bytes are adjacent.
    """
    per_block = BYTES_PER_COLUMN[block]
    in_run = column * run
    at = column * 4
    with c.each(0, n // block) as i:
        to = target + i * per_block * columns
        if block == 32:
            d, quads = _rounded32(c, source + i * 128)
            c.store(to + D * columns + at, _through_half(c, d))
            total = _store(c, quads, to + in_run, columns, run)
            c.store(to + D_SUM * columns + at, _through_half(c, d * total.to(F32)))
            c.store(to + MINUS_SUM * columns + at, -total)
        else:

            def place(part: Value, to: Value = to) -> Value:
                if run <= 16:
                    return to + part * 16 * columns + in_run
                return to + part // (run // 16) * run * columns + part % (run // 16) * 16 + in_run

            d, s16 = _rounded256(c, source + i * 1024, place, columns, run)
            c.store(to + D_256 * columns + at, d)
            pairs = to + SUMS_OF_32 * columns + at
            for p, (low, high) in enumerate(_pairs(_sums_of_32(s16)) + _pairs(s16)):
                c.store(pairs + columns * (4 * p), low)
                c.store(pairs + columns * (4 * p) + 2, high)


def quantize_units(c: Code, source: Value, n: Value, target: Value, *, block: int) -> None:
    """Quantize n f32 at `source` into a column of units at `target`, both aligned to 16 bytes. For devices that have
    vectors of 32 lanes.
    """
    if block == 32:
        with c.each(0, n // 32) as i:
            _unit_part_of_32(c, source + i * 128, target + i // 8 * UNIT_BYTES, i % 8)
    else:
        with c.each(0, n // 64) as i:
            _unit_part_of_256(c, source + i // 4 * 1024, target + i // 4 * UNIT_BYTES, i % 4)


def _unit_part_of_32(c: Code, source: Value, unit: Value, i: Value) -> None:
    """Quantize the 32 f32 at `source`: block i of a unit."""
    values = c.load(_F32x32, source, 16)
    d, inverse = _scales(c, _greatest(c, c.abs(values)), 32)
    total = c.sum_lanes(_store_wide(c, values * inverse, unit + i * 32))
    c.store(unit + i * 4 + UNIT_D, _through_half(c, d))
    c.store(unit + i * 4 + UNIT_D_SUM, _through_half(c, d * total.to(F32)))
    c.store(unit + i * 2 + UNIT_MINUS_SUM, (-total).to(I16))


def _unit_part_of_256(c: Code, source: Value, unit: Value, quarter: Value) -> None:
    """Quantize a quarter of the 256 f32 at `source`. Every quarter looks for the greatest of all."""
    peak = c.const(_F32x32, 0.0)
    for v in range(8):
        peak = c.max(peak, c.abs(c.load(_F32x32, source + 128 * v, 16)))
    d, inverse = _scales(c, _greatest(c, peak), 32)
    c.store(unit + UNIT_D_256, d)
    own, to = source + quarter * 256, unit + quarter * 64
    sums = []
    for half in range(2):
        fours = _store_wide(c, c.load(_F32x32, own + 128 * half, 16) * inverse, to + 32 * half)
        for lanes in ((1, 0, 3, 2, 5, 4, 7, 6), (2, 3, 0, 1, 6, 7, 4, 5)):
            fours = fours + c.shuffle(fours, None, lanes)
        sums.append(fours)  # of the first sixteen in the first four lanes, of the others in the last
    pairs = (sums[0] & 0xFFFF) | (sums[1] << 16)
    for i in range(2):
        c.store(unit + quarter * 8 + (UNIT_SUMS_OF_16 + 4 * i), pairs.lane(4 * i), 4)
        both = sums[i] + c.shuffle(sums[i], None, (4, 5, 6, 7, 0, 1, 2, 3))
        at = unit + (quarter // 2 * 8 + quarter % 2 * 2)
        c.store(at + (UNIT_SUMS_OF_32 + 4 * i), both.lane(0).to(I16))


def _store_wide(c: Code, numbers: Value, to: Value) -> Value:
    """Round 32 numbers and store them as bytes. Return the sums of four neighbors."""
    whole = c.round(numbers).to(_I32x32)
    c.store(to, whole.cast("i8").bits(I32x8), 4)
    return _of_four(c, whole, lambda one, other: one + other)


def _greatest(c: Code, numbers: Value) -> Value:
    """The greatest of 32 numbers."""
    return c.max_lanes(_of_four(c, numbers, c.max))


def _of_four(c: Code, numbers: Value, function: Callable[[Value, Value], Value]) -> Value:
    """A function of each four neighbors of 32: a thread of a GPU has them."""
    parts = [c.shuffle(numbers, None, range(i, 32, 4)) for i in range(4)]
    return function(function(parts[0], parts[1]), function(parts[2], parts[3]))


def _scales(c: Code, most: Value, lanes: int = 8) -> tuple[Value, Value]:
    """d, and its inverse in all lanes, for values of at most `most`."""
    return most / 127.0, c.select(most > 0.0, c.f32(127.0) / most, c.f32(0.0)).splat(lanes)


def _rounded32(c: Code, source: Value) -> tuple[Value, list[Value]]:
    """d, and the 32 f32 at `source` as small integers."""
    peak, values = c.const(F32x8, 0.0), [c.load(F32x8, source + 32 * v) for v in range(4)]
    for v in values:
        peak = c.max(peak, c.abs(v))
    d, inverse = _scales(c, c.max_lanes(peak))
    return d, [c.round(v * inverse).to(I32x8) for v in values]


def _rounded256(
    c: Code, source: Value, place: Callable[[Value], Value], columns: Value, run: int
) -> tuple[Value, list[Value]]:
    """Store the 256 f32 at `source` as bytes, each sixteen at a `place`. Return d and the sums of sixteen."""
    greatest = c.var(c.const(F32x8, 0.0))
    with c.range(0, 8) as part:
        for k in range(4):
            greatest.value = c.max(greatest.value, c.abs(c.load(F32x8, source + part * 128 + 32 * k)))
    d, inverse = _scales(c, c.max_lanes(greatest.value))
    sums = c.scratch(16 * 2)
    with c.range(0, 16) as part:
        two = [c.load(F32x8, source + part * 64 + 32 * k) for k in range(2)]
        quads = [c.round(v * inverse).to(I32x8) for v in two]
        c.store(sums + part * 2, _store(c, quads, place(part), columns, run).to(I16))
    return d, [c.load(I16, sums + 2 * s) for s in range(16)]


def _sums_of_32(s16: list[Value]) -> list[Value]:
    return [s16[2 * s] + s16[2 * s + 1] for s in range(8)]


def _through_half(c: Code, v: Value) -> Value:
    """Round an f32 to f16, unless it is too large for one (a sum of large activations, for which ggml gets
    infinity).
    """
    return c.select(c.abs(v) > 65504.0, v, v.to(F16).to(F32))


def _pairs(sums: list[Value]) -> list[tuple[Value, Value]]:
    return [(sums[q + k], sums[q + k + 2]) for q in range(0, len(sums), 4) for k in range(2)]


def _store(c: Code, quads: list[Value], to: Value, columns: Value, run: int) -> Value:
    """Store vectors of eight small integers as bytes, `run` of them adjacent and runs run·columns apart. Return the sum
    of all.
    """
    total = quads[0]
    for more in quads[1:]:
        total = total + more
    for v, quad in enumerate(quads):
        small = quad.to(quad.type._replace(elem="i8"))
        if run > 4:
            c.store(to + (columns * (8 * v // run * run) + 8 * v % run), small)
            continue
        cells = small.bits(I32._replace(lanes=2))
        for k in range(2):
            c.store(to + columns * (4 * (2 * v + k)), cells.lane(k))
    half = c.shuffle(total, None, (0, 1, 2, 3)) + c.shuffle(total, None, (4, 5, 6, 7))
    pair = c.shuffle(half, None, (0, 1)) + c.shuffle(half, None, (2, 3))
    return pair.lane(0) + pair.lane(1)
