"""Matrix products of quantized weights with quantized activations: y = W·x.

One arithmetic for every batch size (invariant "one numerics"): for each output, blocks are taken in order along K.
Within a block the integer dot product is exact; then one fused multiply-add adds it to the f32 sum. `matmul_few` keeps
a block's unpacked weights in registers for up to `Lowering.few` columns, and repeats that for up to `Lowering.passes`
times as many. `matmul_many` unpacks 8 or 16 rows of a stretch of K into scratch (L1) and uses them for all columns.
Lanes are rows in both, so the float operations are the same ones in the same order.

Layout of x: see `activations.py`. W: row r at w + r·row_bytes as in the file. y: f32, column j at y + j·y_stride.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace

from llamado.devices.kernel import kernel
from llamado.devices.kernels import activations as acts
from llamado.devices.kernels.activations import BYTES_PER_COLUMN
from llamado.devices.kernels.formats import in_blocks
from llamado.devices.kernels.formats.format import Block32, Block256, Blocks, Blocks32, Blocks256
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import Code, Type, Value, Var, Work
from llamado.gguf.types import TensorType


class Columns(ABC):
    """Addresses of `n` quantized columns at their current block (layout: see `activations.py`)."""

    n: int

    @abstractmethod
    def address(self, at: Value | int, j: int) -> Value:
        """Address of byte `at` of column j, in units of a single column."""

    @abstractmethod
    def from_byte(self, at: Value | int) -> Columns:
        """The same columns from byte `at` on."""

    def cells(self, g: int) -> list[Value]:
        """Addresses of the four numbers of group `g` of each column."""
        return [self.address(4 * g, j) for j in range(self.n)]


class InterleavedColumns(Columns):
    """The first `n` of a group of `width` columns (default: n), interleaved from address x on."""

    def __init__(self, x: Value, n: int, width: int = 0) -> None:
        self.x, self.n, self.width = x, n, width or n

    def address(self, at: Value | int, j: int) -> Value:
        return self.x + (at * self.width + 4 * j)

    def from_byte(self, at: Value | int) -> Columns:
        return InterleavedColumns(self.x + at * self.width, self.n, self.width)

    def cells(self, g: int) -> list[Value]:
        run = self.x.code.lowering.run
        first, inside = 4 * g // run * run, 4 * g % run
        return [self.x + (first * self.width + run * j + inside) for j in range(self.n)]


class ScatteredColumns(Columns):
    """Columns that are groups of one, each at an address of its own."""

    def __init__(self, columns: Sequence[Value]) -> None:
        self.columns, self.n = columns, len(columns)

    def address(self, at: Value | int, j: int) -> Value:
        return self.columns[j] + at

    def from_byte(self, at: Value | int) -> Columns:
        return ScatteredColumns([column + at for column in self.columns])


_FIELDS = ("w", "row_bytes", "n_blocks", "n_rows", "x", "n_columns", "y", "y_stride", "share")

_NEAR = 8192
"""Most bytes of a panel of small blocks for which the next panel is also prefetched into L1."""

_FETCHED = 128 << 10
"""Most bytes of the next product that a thread prefetches when it is done with one."""

MIN_GROUP = 4
"""Least columns of a padded group."""

STRETCH = 2048
"""Weights of a row unpacked at a time by `matmul_many` for eight rows, half as many for 16: they stay in L1."""


Among = Callable[[Iterable[Value]], Iterable[Value]]
"""Yields the groups it gets, with other instructions between them."""


class Prefetches:
    """Cache lines to prefetch while a block is multiplied, a few with each group of weights.

    A core can wait for few lines at once (10 to 16 in L1). Prefetches in direct succession would stall for a free
    entry, together with everything behind them, so that the core either multiplies or reads.
    """

    def __init__(self, c: Code, turns: int) -> None:
        self._c, self._turns = c, turns
        self._turn = 0
        self._lines: list[tuple[Sequence[Value], bool]] = []

    def add(self, lines: Sequence[Value], *, near: bool) -> None:
        """Add addresses to prefetch evenly over all turns, into L1 (near) or L2."""
        self._lines.append((lines, near))

    def among(self, groups: Iterable[Value]) -> Iterator[Value]:
        """Yield the groups; before each one prefetch its share of the lines."""
        for group in groups:
            turn, self._turn = self._turn, self._turn + 1
            for lines, near in self._lines:
                for line in lines[len(lines) * turn // self._turns : len(lines) * (turn + 1) // self._turns]:
                    self._c.prefetch(line, near=near)
            self._c.fence()
            yield group


def _step32(
    c: Code, form: Blocks32, block: Block32, x: Columns, sums: Sequence[Var], zero: int, among: Among = iter
) -> None:
    """Add 32 weights of the panel's rows, with this zero point, times the columns at x to the f32 sums."""
    n = len(sums)
    i32 = block.d.type._replace(elem="i32")
    totals = [c.const(i32, 0)] * n
    if zero:
        totals = [c.splat_load(i32, x.address(acts.MINUS_SUM, j)) * zero for j in range(n)]
    totals = c.lowering.hold(c, totals)
    addresses = [x.cells(g) for g in range(8)]
    if block.d_high is None:
        c.lowering.dot(c, totals, among(block.groups), addresses, form.peak)
        found = [(c.lowering.release(c, totals), block.d)]
    else:
        first, zeros = (c.lowering.hold(c, [c.const(i32, 0)] * n) for _ in range(2))
        c.lowering.dot(c, first, among(block.groups[:4]), addresses[:4], form.peak)
        if zero:  # the columns have no sum of the first sixteen activations
            c.lowering.dot(c, zeros, [c.const(block.groups[0].type, zero)] * 4, addresses[:4], form.peak)
            first = [total - z for total, z in zip(first, zeros, strict=True)]
            totals = [total + z for total, z in zip(totals, zeros, strict=True)]
        c.lowering.dot(c, totals, among(block.groups[4:]), addresses[4:], form.peak)
        found = [(c.lowering.release(c, first), block.d), (c.lowering.release(c, totals), block.d_high)]
    finish32(c, found, block.m, x, sums)


def finish32(
    c: Code, found: Sequence[tuple[Sequence[Value], Value]], m: Value | None, x: Columns, sums: Sequence[Var]
) -> None:
    """Add the integer sums of 32 weights, or of each half of them, to the f32 sums. `found`: the integer sums with
    their d.
    """
    f32 = sums[0].type
    for j, total in enumerate(sums):
        d, value = c.splat_load(f32, x.address(acts.D, j)), total.value
        d_sum = None if m is None else c.splat_load(f32, x.address(acts.D_SUM, j))
        for factors in terms32([(part[j], part_d) for part, part_d in found], m, d, d_sum):
            value = c.fma(*factors, value)
        total.value = value


def terms32(
    found: Sequence[tuple[Value, Value]], m: Value | None, d: Value, d_sum: Value | None
) -> Iterator[tuple[Value, Value]]:
    """Yield the factors of the products that 32 weights add to an f32 sum, in order. `found`: integer sums with their d
    of the weights; `d` and `d_sum` of the activations.
    """
    for part, part_d in found:
        yield part.to(part_d.type), part_d * d
    if m is not None:
        assert d_sum is not None
        yield m, d_sum


def finish256(
    c: Code, form: Blocks256, block: Block256, totals: Sequence[Value], x: Columns, sums: Sequence[Var], zero: int
) -> None:
    """Add a super-block's scaled integer sums, of weights with this zero point, to the f32 sums."""
    n = len(sums)
    i32, f32 = block.d.type._replace(elem="i32"), block.d.type
    first = acts.SUMS_OF_16 if form.part == 16 else acts.SUMS_OF_32
    pairs = block.pairs if form.has_min or zero else []
    addresses = [[x.address(first + 4 * p, j) for j in range(n)] for p in range(len(pairs))]
    for j in range(n):
        mins = c.lowering.dot_pairs(c, pairs, addresses, j) if pairs else c.const(i32, 0)
        d = c.splat_load(f32, x.address(acts.D_256, j))
        sums[j].value = c.fma(scaled256(block, totals[j], mins, zero), d, sums[j].value)


def scaled256(block: Block256, total: Value, mins: Value, zero: int) -> Value:
    """Return the product of a super-block's weights, with this zero point, and integer activations. `total`: their
    scaled integer sum; `mins`: the sum for its minimums or zero points.
    """
    f32 = block.d.type
    if block.dmin is not None:
        return block.d * total.to(f32) - block.dmin * mins.to(f32)
    return block.d * (total - mins * zero if zero else total).to(f32)


def _step256(
    c: Code, form: Blocks256, block: Block256, columns: Sequence[Columns], sums: Sequence[Var], among: Among = iter
) -> None:
    """Add one super-block of the panel's rows times each group of columns to the f32 sums."""
    group, nothing = 0, c.const(block.d.type._replace(elem="i32"), 0)
    totals = [c.lowering.hold(c, [nothing] * x.n) for x in columns]
    for groups, scale in block.parts:
        groups = c.lowering.arrange(c, groups, columns[0].n)
        for k, x in enumerate(columns):
            addresses = [x.cells(group + g) for g in range(len(groups))]
            given = among(groups) if k == 0 else groups
            if scale is None:
                c.lowering.dot(c, totals[k], given, addresses, form.peak)
            else:
                c.lowering.dot_scaled(c, totals[k], given, addresses, scale, form.peak)
        group += len(groups)
    first = 0
    for x, found in zip(columns, totals, strict=True):
        finish256(c, form, block, c.lowering.release(c, found), x, sums[first : first + x.n], form.zero(c.lowering))
        first += x.n


class RowPanel:
    """`n` rows of weights from address `first` on."""

    def __init__(self, c: Code, first: Value, row_bytes: Value, n: int) -> None:
        self._c, self.first, self.row_bytes, self.n = c, first, row_bytes, n
        # all that registers have to hold: every row is a sum of two of these, which address modes compute
        self._steps = [c.opaque(row_bytes * step) for step in range(1, 4)]
        self._fours = [c.opaque(row_bytes * four) for four in range(4, n, 4)]

    def block(self, number: Value, block_bytes: int) -> Panel:
        """Return block `number` of each row."""
        return Panel(self._c, self.addresses(number * block_bytes), block_bytes)

    def addresses(self, offset: Value | int) -> list[Value]:
        """Return the addresses at `offset` of each row."""
        first = self.first + offset
        fours = [first, *(first + four for four in self._fours)]
        return [row for four in fours for row in (four, *(four + step for step in self._steps))]


def rows_of_one_column(form: Blocks, panel_rows: int) -> int:
    """Rows that are unpacked together for one column, if several columns unpack `panel_rows`.

    Super-blocks take eight: prefetches are more even with fewer rows at a time.
    """
    return 8 if isinstance(form, Blocks256) else panel_rows


def prefetches_to_l1(form: Blocks, panel_bytes: int) -> bool:
    """Return True if a product, panel after panel, prefetches the next panel a second time, into L1, because it is
    short.

    For super-blocks the next blocks of the same rows are prefetched instead, for any row length.
    """
    return isinstance(form, Blocks32) and panel_bytes <= _NEAR


@kernel(*_FIELDS, "next", "next_panels", "next_panel_bytes")
def matmul_few(
    c: Code,
    a: SimpleNamespace,
    work: Work,
    *,
    weights: str,
    columns: int,
    near: bool,
    panel_rows: int,
) -> None:
    """y for `columns` columns, or for at most as many if they exceed the registers. `panel_rows`, 8 or 16: rows
    unpacked together.

    Those rows are as many short streams, which defeat the hardware's prefetching, so the next ones are prefetched here.
    Columns that exceed the registers follow in a second pass over the panel, which is cached by then.
    """
    form, wide, at_once = in_blocks(TensorType[weights]), c.lowering.columns, c.lowering.few
    size = a.n_blocks * form.column_bytes
    nowhere = c.scratch(4 * panel_rows) if columns > at_once else None
    with c.shares(work, (a.n_rows + (panel_rows - 1)) // panel_rows, a.share) as number:
        first = c.min(number * panel_rows, a.n_rows - panel_rows)
        panel = RowPanel(c, a.w + first * a.row_bytes, a.row_bytes, panel_rows)
        for start in range(0, columns, at_once):
            x = few_columns(a.x + size * start, min(at_once, columns - start), wide, size)
            found = products(c, form, a.n_blocks, panel, x, near, ahead=start == 0)
            for j, total in enumerate(found, start):
                target = a.y + j * a.y_stride + first * 4
                if nowhere is not None and j > columns - MIN_GROUP:  # the column may be padding of the last group
                    target = c.select(a.n_columns > j, target, nowhere)
                c.store(target, total.value)
    _fetch_next(c, a, work)


def few_columns(x: Value, n: int, wide: int, column_bytes: Value) -> list[Columns]:
    """The first n columns at x, of `column_bytes` each: one group, or groups of `wide` and one for the rest."""
    if n <= wide:
        return [InterleavedColumns(x, n)]
    rest = (
        [InterleavedColumns(x + column_bytes * (n // wide * wide), n % wide, 4 if n % wide <= 4 else wide)]
        if n % wide
        else []
    )
    return [*(InterleavedColumns(x + column_bytes * first, wide) for first in range(0, n - wide + 1, wide)), *rest]


def products(
    c: Code,
    form: Blocks32 | Blocks256,
    n_blocks: Value,
    panel: RowPanel,
    columns: Sequence[Columns],
    near: bool,
    *,
    ahead: bool = True,
) -> list[Var]:
    """Return the sums of a panel's rows times groups of columns. `ahead`: prefetch the following rows, with `near` also
    into L1.
    """
    sums = [c.var(c.const(Type("f32", panel.n), 0.0)) for x in columns for _ in range(x.n)]
    with c.range(0, n_blocks) as i:
        prefetches = _ahead(c, form, n_blocks, panel, i, near) if ahead else Prefetches(c, form.block // 4)
        here = panel.block(i, form.block_bytes)
        at_x = [x.from_byte(i * form.column_bytes) for x in columns]
        if isinstance(form, Blocks32):
            for part, block in enumerate(form.unpack(c, here)):
                block.groups = c.lowering.arrange(c, block.groups, columns[0].n)
                first = 0
                for x in at_x:
                    here_x, of = x.from_byte(part * BYTES_PER_COLUMN[32]), sums[first : first + x.n]
                    among: Among = iter if first else prefetches.among
                    _step32(c, form, block, here_x, of, form.zero(c.lowering), among)
                    first += x.n
        else:
            _step256(c, form, form.unpack(c, here), at_x, sums, prefetches.among)
    return sums


def _ahead(c: Code, form: Blocks32 | Blocks256, n_blocks: Value, panel: RowPanel, i: Value, near: bool) -> Prefetches:
    """Prefetches for the time that block i of a panel is multiplied: as many bytes of the panel after the next one into
    L2, and the next bytes into L1, unless they are there already.
    """
    prefetches, size = Prefetches(c, form.block // 4), panel.n * form.block_bytes
    step = panel.row_bytes * panel.n
    lines = range(0, size, 64)
    prefetches.add([panel.first + step * 2 + i * size + line for line in lines], near=False)
    if isinstance(form, Blocks256):
        after = i + 1
        next_block = panel.addresses(c.select(after < n_blocks, after * form.block_bytes, step))
        # its first line is that of this block's end, or covered by the lines in between
        lines = range(63, form.block_bytes + 63, 64)
        prefetches.add([row + line for row in next_block for line in lines], near=True)
    elif near:
        prefetches.add([panel.first + step + i * size + line for line in lines], near=True)
    return prefetches


def _fetch_next(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Prefetch the first panels of this thread's stretch of the next product, so that they arrive while it waits."""
    first = a.next + a.next_panels * work.thread // work.threads * a.next_panel_bytes
    with c.range(first, first + c.min(a.next_panel_bytes * 3, c.i64(_FETCHED)), 64) as line:
        c.prefetch(line, near=False)


def slots(form: Blocks32 | Blocks256) -> int:
    """Vectors of one unpacked block in scratch: groups, scales, pairs, d and dmin (m, or the other d)."""
    return 10 * form.n_parts if isinstance(form, Blocks32) else 64 + form.n_parts + form.n_pairs + 2


def _unpacked_zero(c: Code, form: Blocks32 | Blocks256) -> int:
    """The zero point of weights in scratch."""
    return 0 if c.lowering.signed else form.zero(c.lowering)


def _groups_to_store(c: Code, form: Blocks32 | Blocks256, groups: Sequence[Value]) -> list[Value]:
    """Convert groups to the form that products of many columns take."""
    off = form.zero(c.lowering) - _unpacked_zero(c, form)
    return c.lowering.arrange(c, [group - off for group in groups] if off else groups, c.lowering.columns)


def unpack(c: Code, form: Blocks32 | Blocks256, panel: Panel, to: Value) -> None:
    """Store one unpacked block of a panel's rows, vector after vector."""
    slot = 4 * panel.n
    if isinstance(form, Blocks32):
        for part, small in enumerate(form.unpack(c, panel)):
            last = small.m if small.d_high is None else small.d_high
            groups = _groups_to_store(c, form, small.groups)
            for g, group in enumerate([*groups, small.d, *([] if last is None else [last])]):
                c.store(to + slot * (10 * part + g), group)
        return
    block, g = form.unpack(c, panel), 0
    for s, (groups, scale) in enumerate(block.parts):
        for group in _groups_to_store(c, form, groups):
            c.store(to + slot * g, group)
            g += 1
        if scale is not None:
            c.store(to + slot * (64 + s), scale)
    at = 64 + form.n_parts
    for p, vector in enumerate([*block.pairs, block.d, *([] if block.dmin is None else [block.dmin])]):
        c.store(to + slot * (at + p), vector)


def step_panel(
    c: Code,
    form: Blocks32 | Blocks256,
    panel: Value,
    x: Columns,
    sums: Sequence[Var],
    prefetch_part: Callable[[Value], None],
) -> None:
    """Like `_step32` and `_step256`, from scratch, for as many rows as the sums have lanes.

    `prefetch_part` is called once for each part of a block, with its number.
    """
    n, lanes, zero = len(sums), sums[0].type.lanes, _unpacked_zero(c, form)
    slot = 4 * lanes
    i8, i16, i32, f32 = Type("i8", 4 * lanes), Type("i16", 2 * lanes), Type("i32", lanes), Type("f32", lanes)
    if isinstance(form, Blocks32):
        for part in range(form.n_parts):
            prefetch_part(c.i64(part))
            at = panel + slot * (10 * part)
            groups = [c.load(i8, at + slot * g) for g in range(8)]
            m = c.load(f32, at + slot * 9) if form.has_min else None
            high = c.load(f32, at + slot * 9) if form.has_halves else None
            block = Block32(groups, c.load(f32, at + slot * 8), m, high)
            _step32(c, form, block, x.from_byte(part * BYTES_PER_COLUMN[32]), sums, zero)
        return
    per_part, n_parts = form.part // 4, form.n_parts
    totals = [c.var(zero) for zero in c.lowering.hold(c, [c.const(i32, 0)] * n)]
    scale_type = c.lowering.scale(c, c.const(i32, 0)).type
    with c.range(0, n_parts) as s:
        prefetch_part(s)
        values = [t.value for t in totals]
        at = panel + s * (slot * per_part)
        groups = [c.load(i8, at + slot * g) for g in range(per_part)]
        x_part = x.from_byte(s * (4 * per_part))
        addresses = [x_part.cells(g) for g in range(per_part)]
        if form.has_scales:
            scale = c.load(scale_type, panel + slot * (64 + s))
            c.lowering.dot_scaled(c, values, groups, addresses, scale, form.peak)
        else:
            c.lowering.dot(c, values, groups, addresses, form.peak)
        for t, v in zip(totals, values, strict=True):
            t.value = v
    at = panel + slot * (64 + n_parts)
    pairs = [c.load(i16, at + slot * p) for p in range(form.n_pairs)]
    at = at + slot * form.n_pairs
    dmin = c.load(f32, at + slot) if form.has_min else None
    big = Block256(c.load(f32, at), dmin, pairs)
    found = c.lowering.release(c, [t.value for t in totals])
    finish256(c, form, big, found, x, sums, zero)


def add_panel(
    c: Code,
    form: Blocks32 | Blocks256,
    scratch: Value,
    blocks: Value,
    x: Columns,
    targets: Sequence[Value],
    on: Value,
    panel_rows: int,
    prefetch_part: Callable[[Value, Value], None] = lambda block, part: None,
) -> None:
    """Multiply a panel's blocks in scratch with the columns at x and store the results at `targets`. `on`: add to the
    values there.

    `prefetch_part` is called with the number of each block and of each of its parts.
    """
    size, per_column, f32 = 4 * panel_rows * slots(form), form.column_bytes, Type("f32", panel_rows)
    sums = [c.var(c.const(f32, 0.0)) for _ in targets]
    with c.when(on):
        for total, target in zip(sums, targets, strict=True):
            total.value = c.load(f32, target)
    with c.range(0, blocks) as i:
        step_panel(c, form, scratch + i * size, x.from_byte(i * per_column), sums, partial(prefetch_part, i))
    for total, target in zip(sums, targets, strict=True):
        c.store(target, total.value)


@kernel(*_FIELDS)
def matmul_many(c: Code, a: SimpleNamespace, work: Work, *, weights: str, panel_rows: int) -> None:
    """y for any number of columns: x in groups of `Lowering.columns`, and a last group of 4 if the rest fits it.

    `panel_rows`, 8 or 16: rows unpacked together, the lanes of the vectors that are multiplied.
    """
    form = in_blocks(TensorType[weights])
    per_column, size = form.column_bytes, 4 * panel_rows * slots(form)
    stretch = STRETCH * 8 // panel_rows // form.block
    scratch, nowhere = c.scratch(stretch * size), c.scratch(4 * panel_rows)
    turns = max(
        1, stretch * form.n_parts // panel_rows
    )  # parts of blocks over which the prefetches of a row are spread
    lines = (stretch * form.block_bytes // 64 + turns) // turns
    wide = c.lowering.columns
    n_wide = a.n_columns // wide
    rest = a.n_columns - n_wide * wide
    if wide > 4:
        n_wide = n_wide + (rest > 4).zext(n_wide.type)
    x_column = a.n_blocks * per_column

    def columns(
        first_row: Value,
        start: Value,
        blocks: Value,
        column: Value,
        n: int,
        prefetch_part: Callable[[Value, Value], None],
    ) -> None:
        """Multiply one group of n columns with the blocks in scratch."""
        x = InterleavedColumns(a.x + column * x_column, n).from_byte(start * per_column)
        targets = []
        for j in range(n):
            inside = column + j < a.n_columns
            targets.append(c.select(inside, a.y + (column + j) * a.y_stride + first_row * 4, nowhere))
        add_panel(c, form, scratch, blocks, x, targets, start > 0, panel_rows, prefetch_part)

    def panel(first: Value) -> None:
        """Multiply a panel's rows with all columns; sums are kept in y from one stretch to the next."""
        panel = RowPanel(c, a.w + first * a.row_bytes, a.row_bytes, panel_rows)
        with c.range(0, a.n_blocks, stretch) as start:
            blocks = c.min(a.n_blocks - start, stretch)
            with c.range(0, blocks) as i:
                unpack(c, form, panel.block(start + i, form.block_bytes), scratch + i * size)
            after = start + stretch
            follows = c.select(after < a.n_blocks, after * form.block_bytes, a.row_bytes * panel_rows)

            def prefetch_part(group: Value, block: Value, part: Value) -> None:
                """During the first group of columns, prefetch a share of the lines that are unpacked next."""
                with c.when(group.equals(0)):
                    turn = block * form.n_parts + part
                    at = panel.first + follows + turn // turns * a.row_bytes + turn % turns * (64 * lines)
                    for line in range(lines):
                        c.prefetch(at + 64 * line, near=False)

            with c.range(0, n_wide) as group:
                columns(first, start, blocks, group * wide, wide, partial(prefetch_part, group))
            if wide > 4:
                with c.when(n_wide * wide < a.n_columns):
                    columns(first, start, blocks, n_wide * wide, 4, lambda block, part: None)
            else:
                with c.when(rest > 0):
                    columns(first, start, blocks, n_wide * wide, wide, lambda block, part: None)

    # A last panel of fewer rows shares some with the panel before it. One thread does both, because another thread
    # would read its unfinished sums.
    panels = a.n_rows // panel_rows
    with c.shares(work, panels, a.share) as number:
        start = number * panel_rows
        stop = c.select((number + 1).equals(panels), a.n_rows, start + panel_rows)
        with c.range(start, stop, panel_rows) as first:
            panel(c.min(first, a.n_rows - panel_rows))
