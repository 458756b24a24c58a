"""Quantized activations: the int8 columns that the matmul kernels multiply weights with.

Columns form groups of `columns`, interleaved run by run so that a group is one stream. A matrix of n columns is whole
groups of `Lowering.columns`, and a last group of 4 if the rest fits it (padding columns have undefined contents). A run
has `Lowering.run` bytes of a column, 4 or 8. Per block and group of n columns:

blocks of 32 (44 bytes a column):   32 × n int8 in runs | n × f32 d | n × f32 d·Σq | n × i32 −Σq
blocks of 256 (308 bytes a column): 256 × n int8 in runs | n × f32 d | 4 × n × pairs of i16 sums of 32
                                    | 8 × n × pairs of i16 sums of 16

Columns in tiles, for `tiles/`: groups of TILE, with RUN adjacent int8 of each column, which are a row of a tile.

Here q = round(x · 127 / max|x|) and d = max|x| / 127: the values of ggml's Q8_0, Q8_1 and Q8_K (ggml-quants.c), with
the scales of the blocks of 32 rounded through f16 like ggml's. Sums are stored in the pairs in which the formats read
mins and scales: (0, 2), (1, 3), (4, 6), ….
"""

from __future__ import annotations

from llamado.devices.cpu.simd import F16, F32, I16, I32, Code, F32x8, I32x8, Value

BYTES_PER_COLUMN = {32: 44, 256: 308}

TILE = 16
"""Columns of a tile, and rows of weights."""
RUN = {32: 32, 256: 64}
"""Bytes of a column that are adjacent in tiles."""

# offsets of the parts in a block of a group of n columns, in units of n bytes
D, D_SUM, MINUS_SUM = 32, 36, 40
D_256, SUMS_OF_32, SUMS_OF_16 = 256, 260, 276


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
    with c.range(0, n // block) as i:
        from_, to = source + i * (4 * block), target + i * per_block * columns
        peak = c.const(F32x8, 0.0)
        if block == 32:
            values = [c.load(F32x8, from_ + 32 * v) for v in range(4)]
            for v in values:
                peak = c.max(peak, c.abs(v))
        else:
            greatest = c.var(peak)
            with c.range(0, 8) as part:
                for k in range(4):
                    greatest.value = c.max(greatest.value, c.abs(c.load(F32x8, from_ + part * 128 + 32 * k)))
            peak = greatest.value
        most = c.max_lanes(peak)
        d = most / 127.0
        inverse = c.select(most > 0.0, c.f32(127.0) / most, c.f32(0.0)).splat(8)
        if block == 32:
            c.store(to + D * columns + at, _through_half(c, d))
            quads = [c.round(v * inverse).to(I32x8) for v in values]
            total = _store(c, quads, to + in_run, columns, run)
            c.store(to + D_SUM * columns + at, _through_half(c, d * total.to(F32)))
            c.store(to + MINUS_SUM * columns + at, -total)
        else:
            c.store(to + D_256 * columns + at, d)
            sums = c.scratch(16 * 2)
            with c.range(0, 16) as part:
                two = [c.load(F32x8, from_ + part * 64 + 32 * k) for k in range(2)]
                quads = [c.round(v * inverse).to(I32x8) for v in two]
                if run <= 16:
                    place = to + part * 16 * columns + in_run
                else:
                    place = to + part // (run // 16) * run * columns + part % (run // 16) * 16 + in_run
                c.store(sums + part * 2, _store(c, quads, place, columns, run).to(I16))
            pairs = to + SUMS_OF_32 * columns + at
            s16 = [c.load(I16, sums + 2 * s) for s in range(16)]
            s32 = [s16[2 * s] + s16[2 * s + 1] for s in range(8)]
            for p, (low, high) in enumerate(_pairs(s32) + _pairs(s16)):
                c.store(pairs + columns * (4 * p), low)
                c.store(pairs + columns * (4 * p) + 2, high)


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
