"""Matrix products of F32, F16 and BF16 weights with f32 activations, and plain copies.

Lanes run over K: each output has eight partial sums (k mod 8) added in one fixed tree at the end, for any number of
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from llamado.devices.cpu.jit import kernel
from llamado.devices.cpu.kernels.elements import SCALAR
from llamado.devices.cpu.kernels.formats import FORMATS
from llamado.devices.cpu.kernels.formats.format import Format, Plain
from llamado.devices.cpu.simd import F32, I32, Code, F32x8, Value, Work
from llamado.gguf.types import TensorType

ROWS, COLUMNS = 4, 2


@kernel(
    "w",
    "w1",
    "w2",
    "w3",
    "x",
    "x1",
    "x2",
    "x3",
    "y",
    "y1",
    "y2",
    "y3",
    "n",
    "n_rows",
    "n_columns",
    "n2",
    "n3",
    "r2",
    "r3",
)
def matmul_float(c: Code, a: SimpleNamespace, work: Work, *, weights: str) -> None:
    """y[i3, i2, column, row] = w[i3/r3, i2/r2, row] · x[i3, i2, column]; a unit of work is four rows and all
    columns.
    """
    form = FORMATS[TensorType[weights]]
    quads = (a.n_rows + (ROWS - 1)) // ROWS
    with c.shares(work, quads * a.n2 * a.n3, c.i64(4)) as unit:
        quad, rest = unit % quads, unit // quads
        i2, i3 = rest % a.n2, rest // a.n2
        w = a.w + i2 // a.r2 * a.w2 + i3 // a.r3 * a.w3
        x, y = a.x + i2 * a.x2 + i3 * a.x3, a.y + i2 * a.y2 + i3 * a.y3
        row_numbers = [c.min(quad * ROWS + r, a.n_rows - 1) for r in range(ROWS)]
        rows = [w + number * a.w1 for number in row_numbers]
        with c.range(0, a.n_columns, COLUMNS) as column:
            numbers = [c.min(column + j, a.n_columns - 1) for j in range(COLUMNS)]
            columns = [x + number * a.x1 for number in numbers]
            for r, totals in enumerate(dot_rows(c, form, rows, columns, a.n)):
                for j, total in enumerate(totals):
                    c.store(y + numbers[j] * a.y1 + row_numbers[r] * 4, total)


def dot_rows(c: Code, form: Format, rows: Sequence[Value], columns: Sequence[Value], n: Value) -> list[list[Value]]:
    """The products of each row of `n` weights with each column of f32."""
    n8 = n // 8 * 8
    sums = [[c.var(c.const(F32x8, 0.0)) for _ in columns] for _ in rows]
    tails = [[c.var(c.f32(0.0)) for _ in columns] for _ in rows]
    for lanes, totals, start, stop in ((8, sums, c.i64(0), n8), (1, tails, n8, n)):
        with c.range(start, stop, lanes) as k:
            xs = [c.load(F32._replace(lanes=lanes), at + k * 4) for at in columns]
            for r, row in enumerate(rows):
                weight = form.load(c, row, k, lanes)
                for j, v in enumerate(xs):
                    totals[r][j].value = c.fma(weight, v, totals[r][j].value)
    return [
        [c.sum_lanes(total.value) + tail.value for total, tail in zip(*line, strict=True)]
        for line in zip(sums, tails, strict=True)
    ]


STRETCH = 192 * 1024
"""Bytes of activations that a thread takes all weights past: they stay in its L2."""

_DEEP = 512
"""Elements of rows and columns worked on at a time: those of a tile stay in L1."""

_MANY_COLUMNS = 3
"""With four rows and one vector of weights they fill AVX2's sixteen registers."""


@kernel(
    *("w", "w1", "w2", "w3", "x", "x1", "x2", "x3", "y", "y1", "y2", "y3"),
    *("n", "n_rows", "n_columns", "n2", "n3", "r2", "r3", "width", "scratch", "scratch_step"),
)
def matmul_float_many(c: Code, a: SimpleNamespace, work: Work, *, weights: str) -> None:
    """As `matmul_float`, with the same bits, for many columns; `n` a multiple of eight and `n_rows` of four.

    A unit of work is four rows, as f32 in scratch, and `width` columns.
    """
    form = FORMATS[TensorType[weights]]
    quads, blocks = a.n_rows // ROWS, (a.n_columns + a.width - 1) // a.width
    scratch = a.scratch + work.thread * a.scratch_step
    with c.shares(work, quads * blocks * a.n2 * a.n3, c.i64(4)) as unit:
        quad, rest = unit % quads, unit // quads
        block, rest = rest % blocks, rest // blocks
        i2, i3 = rest % a.n2, rest // a.n2
        w = a.w + i2 // a.r2 * a.w2 + i3 // a.r3 * a.w3
        x, y = a.x + i2 * a.x2 + i3 * a.x3, a.y + i2 * a.y2 + i3 * a.y3
        rows = [w + (quad * ROWS + r) * a.w1 for r in range(ROWS)]
        if form.type is not TensorType.F32:
            plain = [scratch + a.n * (4 * r) for r in range(ROWS)]
            with c.range(0, a.n, 8) as k:
                for row, to in zip(rows, plain, strict=True):
                    c.store(to + k * 4, form.load(c, row, k))
            rows = plain
        partial = scratch + a.n * (4 * ROWS)
        first = block * a.width
        stop = c.min(first + a.width, a.n_columns)
        with c.range(0, a.n, _DEEP) as k_first, c.range(first, stop, _MANY_COLUMNS) as column:
            k_stop = c.min(k_first + _DEEP, a.n)
            numbers = [c.min(column + j, stop - 1) for j in range(_MANY_COLUMNS)]
            columns = [x + number * a.x1 for number in numbers]
            here = partial + (column - first) * (32 * ROWS)
            places = [[here + 32 * (j * ROWS + r) for r in range(ROWS)] for j in range(_MANY_COLUMNS)]
            zero, on = c.const(F32x8, 0.0), k_first > 0
            sums = [[c.var(c.select(on, c.load(F32x8, at), zero)) for at in line] for line in places]
            with c.range(k_first, k_stop, 8) as k:
                xs = [c.load(F32x8, at + k * 4) for at in columns]
                for r, row in enumerate(rows):
                    weight = c.load(F32x8, row + k * 4)
                    for j, v in enumerate(xs):
                        sums[j][r].value = c.fma(weight, v, sums[j][r].value)
            values = [[total.value for total in line] for line in sums]
            with c.when(k_stop < a.n):
                for line, found in zip(places, values, strict=True):
                    for at, value in zip(line, found, strict=True):
                        c.store(at, value)
            with c.when(k_stop.equals(a.n)):
                # + 0: what the tail adds in `matmul_float`
                pair, last = c.sum_lanes8(values[0] + values[1]) + 0.0, c.sum_lanes8(values[2] + values[2]) + 0.0
                low, high = (0, 1, 2, 3), (4, 5, 6, 7)
                totals = [c.shuffle(pair, None, low), c.shuffle(pair, None, high), c.shuffle(last, None, low)]
                for number, total in zip(numbers, totals, strict=True):
                    c.store(y + number * a.y1 + quad * (4 * ROWS), total)


def many_scratch(n: int, width: int) -> int:
    """Scratch one thread needs for `matmul_float_many`: four rows as f32, and the sums of `width` columns so far."""
    return 4 * ROWS * n + 32 * ROWS * (width + _MANY_COLUMNS)


@kernel(
    *(f"{side}{part}" for side in "xy" for part in ("", "0", "1", "2", "3")),
    *(f"{k}{d}" for k in "nm" for d in range(4)),
)
def copy(c: Code, a: SimpleNamespace, work: Work, *, source: str, target: str, repeated: bool) -> None:
    """y = x element by element, any strides (of a shared shape n), converting between plain types.

    `repeated`: x has shape m and is repeated until it fills y.
    """
    from_, to = TensorType[source], TensorType[target]
    with c.shares(work, a.n1 * a.n2 * a.n3, c.i64(8)) as row:
        i1, rest = row % a.n1, row // a.n1
        i2, i3 = rest % a.n2, rest // a.n2
        y = a.y + i1 * a.y1 + i2 * a.y2 + i3 * a.y3
        if repeated:
            i1, i2, i3 = i1 % a.m1, i2 % a.m2, i3 % a.m3
        x = a.x + i1 * a.x1 + i2 * a.x2 + i3 * a.x3
        with c.range(0, a.n0) as i:
            at_x, at_y = x + (i % a.m0 if repeated else i) * a.x0, y + i * a.y0
            if from_ == to:
                c.store(at_y, c.load(SCALAR[from_], at_x))
            elif to is TensorType.I32:
                c.store(at_y, FORMATS[from_].load(c, at_x, c.i64(0), 1).to(I32))
            else:
                value = (
                    c.load(I32, at_x).to(F32) if from_ is TensorType.I32 else FORMATS[from_].load(c, at_x, c.i64(0), 1)
                )
                form = FORMATS[to]
                assert isinstance(form, Plain)
                form.store(c, at_y, c.i64(0), value)


@kernel("x", "size", "number")
def fill(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Makes `size` bytes, a whole number of f32, one number."""
    pages = (a.size + 4095) // 4096
    with (
        c.shares(work, pages, c.i64(4)) as page,
        c.range(page * 4096, c.min(page * 4096 + 4096, a.size), 4) as i,
    ):
        c.store(a.x + i, a.number.to(I32).bits(F32))
