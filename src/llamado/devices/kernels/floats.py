"""Matrix products of F32, F16 and BF16 weights with f32 activations, and plain copies.

Lanes run over K: each output has eight partial sums (k mod 8), added in one fixed tree at the end, for any number of
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

from llamado.devices.kernel import kernel
from llamado.devices.kernels.elements import SCALAR
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.kernels.formats.format import Format, Plain
from llamado.devices.simd import F32, I32, Code, F32x8, Type, Value, Work
from llamado.gguf.types import TensorType

ROWS, COLUMNS = 4, 2

_AHEAD = 16
"""Rows between those that are multiplied and those that are prefetched: short rows defeat the hardware's
prefetching.
"""


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
def matmul_float(c: Code, a: SimpleNamespace, work: Work, *, weights: str, columns: int) -> None:
    """y[i3, i2, column, row] = w[i3/r3, i2/r2, row] · x[i3, i2, column].

    A unit of work is four rows and all columns, `columns` (1 or 2) at a time.
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
        ahead = rows[0] + a.w1 * _AHEAD
        with c.range(0, a.n_columns, columns) as column:
            numbers = [c.min(column + j, a.n_columns - 1) for j in range(columns)]
            xs = [x + number * a.x1 for number in numbers]
            for r, totals in enumerate(dot_rows(c, form, rows, xs, a.n, ahead)):
                for j, total in enumerate(totals):
                    c.store(y + numbers[j] * a.y1 + row_numbers[r] * 4, total)


def dot_rows(
    c: Code, form: Format, rows: Sequence[Value], columns: Sequence[Value], n: Value, ahead: Value | None = None
) -> list[list[Value]]:
    """Return the products of each row of `n` weights with each column of f32. Prefetches as many bytes from `ahead`."""
    n8 = n // 8 * 8
    sums = [[c.var(c.const(F32x8, 0.0)) for _ in columns] for _ in rows]
    tails = [[c.var(c.f32(0.0)) for _ in columns] for _ in rows]
    for lanes, totals, start, stop in ((8, sums, c.i64(0), n8), (1, tails, n8, n)):
        with c.range(start, stop, lanes) as k:
            if ahead is not None and (lanes, form.block_bytes) == (
                8,
                2,
            ):  # a cache line per turn; f32 is as fast without
                c.prefetch(ahead + k * (2 * len(rows)), near=False)
            xs = [c.load(F32._replace(lanes=lanes), at + k * 4) for at in columns]
            for r, row in enumerate(rows):
                weight = form.load(c, row, k, lanes)
                for j, v in enumerate(xs):
                    totals[r][j].value = c.fma(weight, v, totals[r][j].value)
    return [
        [c.sum_lanes(total.value) + tail.value for total, tail in zip(*line, strict=True)]
        for line in zip(sums, tails, strict=True)
    ]


STRETCH = 512 * 1024
"""Bytes of activations that a thread multiplies with all weights before the next ones: they stay in its L2."""

_DEEP = 512
"""Elements of rows and columns processed at a time: those of a tile stay in L1."""

_VECTORS = 4
"""Vectors of weights in a tile."""

_TAIL = 8
"""Room for the last elements of rows that are no multiple of eight."""


class FloatTile(NamedTuple):
    """The sums that `matmul_float_many` keeps in registers: `rows` rows, one or two to a vector, and `columns` columns.

    Three columns and one vector of weights fill AVX2's sixteen registers, six and four vectors AVX-512's 32.
    """

    rows: int
    columns: int


def tile(panel_rows: int) -> FloatTile:
    """Return the tile size for vectors of 8 or 16 lanes."""
    return FloatTile(_VECTORS, 3) if panel_rows == 8 else FloatTile(2 * _VECTORS, 6)


@kernel(
    *("w", "w1", "w2", "w3", "x", "x1", "x2", "x3", "y", "y1", "y2", "y3"),
    *("n", "n_rows", "n_columns", "n2", "n3", "r2", "r3", "width", "scratch", "scratch_step"),
)
def matmul_float_many(c: Code, a: SimpleNamespace, work: Work, *, weights: str, rows: int, columns: int) -> None:
    """`matmul_float` for many columns, with the same bits. Rows have at least eight elements, and there are at least a
    tile's rows.

    A unit of work is a tile's rows, as f32 in scratch, and `width` columns. Vectors of 16 lanes hold eight partial sums
    of each of two rows.
    """
    form = FORMATS[TensorType[weights]]
    each = rows // _VECTORS
    vector = Type("f32", 8 * each)
    of_rows = Type("f32", rows)
    n8 = a.n // 8 * 8
    panels, blocks = (a.n_rows + (rows - 1)) // rows, (a.n_columns + a.width - 1) // a.width
    panel_at = a.scratch + work.thread * a.scratch_step
    tail_at = panel_at + n8 * (4 * rows)
    partial = tail_at + _TAIL * (4 * rows)
    with c.shares(work, panels * blocks * a.n2 * a.n3, c.i64(4)) as unit:
        panel, rest = unit % panels, unit // panels
        block, rest = rest % blocks, rest // blocks
        i2, i3 = rest % a.n2, rest // a.n2
        w = a.w + i2 // a.r2 * a.w2 + i3 // a.r3 * a.w3
        x, y = a.x + i2 * a.x2 + i3 * a.x3, a.y + i2 * a.y2 + i3 * a.y3
        first_row = c.min(panel * rows, a.n_rows - rows)
        sources = [w + (first_row + r) * a.w1 for r in range(rows)]
        with c.range(0, n8, 8) as k:
            for r, row in enumerate(sources):
                c.store(panel_at + k * (4 * rows) + 32 * r, form.load(c, row, k))
        with c.range(n8, a.n) as k:
            for r, row in enumerate(sources):
                c.store(tail_at + (k - n8) * (4 * rows) + 4 * r, form.load(c, row, k, 1))
        first = block * a.width
        stop = c.min(first + a.width, a.n_columns)
        with c.range(0, n8, _DEEP) as k_first, c.range(first, stop, columns) as column:
            k_stop = c.min(k_first + _DEEP, n8)
            numbers = [c.min(column + j, stop - 1) for j in range(columns)]
            xs = [x + number * a.x1 for number in numbers]
            here = partial + (column - first) * (32 * rows)
            places = [[here + 32 * (j * rows + v * each) for v in range(_VECTORS)] for j in range(columns)]
            sums = [[c.var(c.const(vector, 0.0)) for _ in line] for line in places]
            with c.when(k_first > 0):
                for line, totals in zip(places, sums, strict=True):
                    for at, total in zip(line, totals, strict=True):
                        total.value = c.load(vector, at)
            with c.range(k_first, k_stop, 8) as k:
                held = [c.load(vector, panel_at + k * (4 * rows) + 32 * each * v) for v in range(_VECTORS)]
                for at, totals in zip(xs, sums, strict=True):
                    eight = c.load(F32x8, at + k * 4)
                    value = c.concat(eight, eight) if each == 2 else eight
                    for weight, total in zip(held, totals, strict=True):
                        total.value = c.fma(weight, value, total.value)
            with c.when(k_stop < n8):
                for line, totals in zip(places, sums, strict=True):
                    for at, total in zip(line, totals, strict=True):
                        c.store(at, total.value)
            with c.when(k_stop.equals(n8)):
                tails = [c.var(c.const(of_rows, 0.0)) for _ in xs]
                with c.range(n8, a.n) as k:
                    weight = c.load(of_rows, tail_at + (k - n8) * (4 * rows))
                    for at, tail in zip(xs, tails, strict=True):
                        tail.value = c.fma(weight, c.splat_load(of_rows, at + k * 4), tail.value)
                eights = [part for totals in sums for total in totals for part in _eights(c, total.value)]
                eights += eights[: -len(eights) % 8]
                for first_eight in range(0, rows * columns, 8):
                    found = c.sum_lanes8(eights[first_eight : first_eight + 8])
                    for r in range(first_eight, min(first_eight + 8, rows * columns), rows):
                        part = found if rows == 8 else c.shuffle(found, None, range(r % 8, r % 8 + rows))
                        c.store(y + numbers[r // rows] * a.y1 + first_row * 4, part + tails[r // rows].value)


def _eights(c: Code, v: Value) -> list[Value]:
    """Split a vector in parts of eight lanes."""
    return [v] if v.type.lanes == 8 else [c.shuffle(v, None, range(at, at + 8)) for at in (0, 8)]


def many_scratch(n: int, width: int, size: FloatTile) -> int:
    """Scratch bytes of one thread for `matmul_float_many`: a tile's rows as f32, and the sums of `width` columns."""
    return 4 * size.rows * (n + _TAIL) + 32 * size.rows * (width + size.columns)


@kernel(
    *(f"{side}{part}" for side in "xy" for part in ("", "0", "1", "2", "3")),
    *(f"{k}{d}" for k in "nm" for d in range(4)),
)
def copy(c: Code, a: SimpleNamespace, work: Work, *, source: str, target: str, repeated: bool) -> None:
    """y = x element by element, with any strides (of a shared shape n), converting between plain types.

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
        with c.singles(0, a.n0) as i:
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
    """Fill `size` bytes, a whole number of f32, with one number."""
    pages = (a.size + 4095) // 4096
    with (
        c.shares(work, pages, c.i64(4)) as page,
        c.range(page * 4096, c.min(page * 4096 + 4096, a.size), 4) as i,
    ):
        c.store(a.x + i, a.number.to(I32).bits(F32))
