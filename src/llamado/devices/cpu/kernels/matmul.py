"""Matrix products of quantised weights with quantised activations: y = W·x.

One arithmetic for every batch size (the law "one numerics"): for each output, blocks are taken in order along K;
within a block the integer dot product is exact; then one fused multiply-add into the f32 sum. `matmul_few` keeps a
block's unpacked weights in registers for up to `Lowering.columns` columns, `matmul_several` does so for a few groups of
them; `matmul_many` unpacks 8 or 16 rows of a
stretch of K into scratch (L1) and spends them on all columns. Lanes are rows in both, so the float operations are the
same ones in the same order.

Layout of x: see `activations.py`. W: row r at w + r·row_bytes as in the file. y: f32, column j at y + j·y_stride.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from llamado.devices.cpu.jit import kernel
from llamado.devices.cpu.kernels import activations as acts
from llamado.devices.cpu.kernels.activations import BYTES_PER_COLUMN
from llamado.devices.cpu.kernels.formats import in_blocks
from llamado.devices.cpu.kernels.formats.format import Block32, Block256, Blocks32, Blocks256
from llamado.devices.cpu.simd import Code, F32x8, I32x8, Type, Value, Var, Work
from llamado.gguf.types import TensorType


class Columns(ABC):
    """Where `n` quantised columns lie: element `at` of column j of the block they stand at (see `activations.py`)."""

    n: int

    @abstractmethod
    def address(self, at: Value | int, j: int) -> Value:
        """Byte `at` of column j, in units of a single column."""

    @abstractmethod
    def behind(self, at: Value | int) -> Columns:
        """The same columns from byte `at` on."""


class Together(Columns):
    """A group of columns, interleaved from address x on."""

    def __init__(self, x: Value, n: int) -> None:
        self.x, self.n = x, n

    def address(self, at: Value | int, j: int) -> Value:
        return self.x + (at * self.n + 4 * j)

    def behind(self, at: Value | int) -> Columns:
        return Together(self.x + at * self.n, self.n)


class Apart(Columns):
    """Columns that are groups of one, each somewhere else, `at` bytes from its address."""

    def __init__(self, columns: Sequence[Value], at: Value | int = 0) -> None:
        self.columns, self.at, self.n = columns, at, len(columns)

    def address(self, at: Value | int, j: int) -> Value:
        return self.columns[j] + self.at + at

    def behind(self, at: Value | int) -> Columns:
        return Apart(self.columns, self.at + at)


_FIELDS = ("w", "row_bytes", "n_blocks", "n_rows", "x", "n_columns", "y", "y_stride", "share")

NEAR = 8192
"""Bytes of eight rows up to which they are asked for twice: far ahead into L2, and one turn ahead into L1."""

SEVERAL = 3
"""Groups of columns up to which `matmul_several` beats `matmul_many`."""

STRETCH = 2048
"""Weights of a row unpacked at a time by `matmul_many` for eight rows, half as many for 16: they stay in L1."""


def _step32(c: Code, form: Blocks32, block: Block32, x: Columns, sums: Sequence[Var]) -> None:
    """Adds 32 weights of the panel's rows times the columns at x to the f32 sums."""
    n, zero = len(sums), form.zero(c.lowering)
    i32 = block.d.type._replace(elem="i32")
    totals = [c.const(i32, 0)] * n
    if zero:
        totals = [c.splat_load(i32, x.address(acts.MINUS_SUM, j)) * zero for j in range(n)]
    addresses = [[x.address(4 * g, j) for j in range(n)] for g in range(8)]
    if block.d_high is None:
        c.lowering.dot(c, totals, block.groups, addresses, form.peak)
        found = [(totals, block.d)]
    else:
        first, zeros = [c.const(i32, 0)] * n, [c.const(i32, 0)] * n
        c.lowering.dot(c, first, block.groups[:4], addresses[:4], form.peak)
        if zero:  # the sum of the first sixteen activations is not among those of the columns
            c.lowering.dot(c, zeros, [c.const(block.groups[0].type, zero)] * 4, addresses[:4], form.peak)
            first = [total - z for total, z in zip(first, zeros, strict=True)]
            totals = [total + z for total, z in zip(totals, zeros, strict=True)]
        c.lowering.dot(c, totals, block.groups[4:], addresses[4:], form.peak)
        found = [(first, block.d), (totals, block.d_high)]
    finish32(c, found, block.m, x, sums)


def finish32(
    c: Code, found: Sequence[tuple[Sequence[Value], Value]], m: Value | None, x: Columns, sums: Sequence[Var]
) -> None:
    """Adds the integer sums of 32 weights, or of each half of them, to the f32 sums: `found` has them with their d."""
    f32 = sums[0].type
    for j, total in enumerate(sums):
        d, value = c.splat_load(f32, x.address(acts.D, j)), total.value
        for part, part_d in found:
            value = c.fma(part[j].to(f32), part_d * d, value)
        if m is not None:
            value = c.fma(m, c.splat_load(f32, x.address(acts.D_SUM, j)), value)
        total.value = value


def finish256(
    c: Code, form: Blocks256, block: Block256, totals: Sequence[Value], x: Columns, sums: Sequence[Var], zero: int
) -> None:
    """Adds a super-block's scaled integer sums, of weights with this zero point, to the f32 sums."""
    n = len(sums)
    i32, f32 = block.d.type._replace(elem="i32"), block.d.type
    first = acts.SUMS_OF_16 if form.part == 16 else acts.SUMS_OF_32
    for j in range(n):
        mins = c.const(i32, 0)
        for p, pair in enumerate(block.pairs if form.has_min or zero else ()):
            sum_pair = c.splat_load(i32, x.address(first + 4 * p, j)).bits(pair.type)
            mins = c.lowering.dot_pairs(c, mins, pair, sum_pair)
        d = c.splat_load(f32, x.address(acts.D_256, j))
        if block.dmin is not None:
            value = block.d * totals[j].to(f32) - block.dmin * mins.to(f32)
        elif zero:
            value = block.d * (totals[j] - mins * zero).to(f32)
        else:
            value = block.d * totals[j].to(f32)
        sums[j].value = c.fma(value, d, sums[j].value)


def _step256(c: Code, form: Blocks256, block: Block256, x: Columns, sums: Sequence[Var]) -> None:
    """Adds one super-block of eight rows times the columns at x to the f32 sums."""
    n, group = len(sums), 0
    totals = [c.const(I32x8, 0)] * n
    for groups, scale in block.parts:
        addresses = [[x.address(4 * (group + g), j) for j in range(n)] for g in range(len(groups))]
        if scale is None:
            c.lowering.dot(c, totals, groups, addresses, form.peak)
        else:
            c.lowering.dot_scaled(c, totals, groups, addresses, scale, form.peak)
        group += len(groups)
    finish256(c, form, block, totals, x, sums, form.zero(c.lowering))


def row_addresses(a: SimpleNamespace, first: Value) -> list[Value]:
    return [a.w + (first + r) * a.row_bytes for r in range(8)]


@kernel(*_FIELDS, "next", "next_panels", "next_row_bytes")
def matmul_few(
    c: Code,
    a: SimpleNamespace,
    work: Work,
    *,
    weights: str,
    columns: int,
    near: bool,
) -> None:
    """y for `columns` columns (one group of x).

    Eight rows are eight short streams, which defeat the hardware's prefetching: the next eight rows are asked for here.
    """
    form = in_blocks(TensorType[weights])
    with c.shares(work, (a.n_rows + 7) // 8, a.share) as panel:
        first = c.min(panel * 8, a.n_rows - 8)
        rows = row_addresses(a, first)
        for j, total in enumerate(products(c, a, form, rows, Together(a.x, columns), near)):
            c.store(a.y + j * a.y_stride + first * 4, total.value)
    _fetch_next(c, a, work)


def products(
    c: Code,
    a: SimpleNamespace,
    form: Blocks32 | Blocks256,
    rows: Sequence[Value],
    x: Columns,
    near: bool | None,
) -> list[Var]:
    """Sums of eight rows times one group of columns at x; `near` None: the rows that follow are not asked for."""
    per_column = form.column_bytes
    sums = [c.var(c.const(F32x8, 0.0)) for _ in range(x.n)]
    with c.range(0, a.n_blocks) as i:
        if near is not None:
            for line in range(0, 8 * form.block_bytes, 64):
                at = rows[0] + i * (8 * form.block_bytes) + line
                if near:
                    c.prefetch(at + a.row_bytes * 8, near=True)
                c.prefetch(at + a.row_bytes * (24 if near else 16), near=False)
        here = [row + i * form.block_bytes for row in rows]
        at_x = x.behind(i * per_column)
        if isinstance(form, Blocks32):
            for part, block in enumerate(form.unpack(c, here)):
                _step32(c, form, block, at_x.behind(part * BYTES_PER_COLUMN[32]), sums)
        else:
            _step256(c, form, form.unpack(c, here), at_x, sums)
    return sums


@kernel(*_FIELDS, "next", "next_panels", "next_row_bytes")
def matmul_several(c: Code, a: SimpleNamespace, work: Work, *, weights: str, near: bool) -> None:
    """y for more columns than one group of x: as `matmul_few` for each group, while the rows are in L1.

    Each group unpacks the rows anew: for a few groups that costs less than passing them through scratch.
    """
    form = in_blocks(TensorType[weights])
    wide = c.lowering.columns
    nowhere = c.scratch(32)
    rest = a.n_columns % wide
    n_wide = a.n_columns // wide
    if wide > 4:
        n_wide = n_wide + (rest > 4).zext(n_wide.type)
    x_column = a.n_blocks * form.column_bytes

    def group(first: Value, rows: Sequence[Value], column: Value | int, n: int, near: bool | None) -> None:
        x = a.x + x_column * column
        for j, total in enumerate(products(c, a, form, rows, Together(x, n), near)):
            inside = (a.n_columns * 0 + column) + j < a.n_columns
            c.store(c.select(inside, a.y + a.y_stride * (column + j) + first * 4, nowhere), total.value)

    with c.shares(work, (a.n_rows + 7) // 8, a.share) as panel:
        first = c.min(panel * 8, a.n_rows - 8)
        rows = row_addresses(a, first)
        group(first, rows, 0, wide, near)
        with c.range(1, n_wide) as number:
            group(first, rows, number * wide, wide, None)
        if wide > 4:
            with c.when(n_wide * wide < a.n_columns):
                group(first, rows, n_wide * wide, 4, None)
        else:
            with c.when(rest > 0):
                group(first, rows, n_wide * wide, wide, None)
    _fetch_next(c, a, work)


def _fetch_next(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Asks for the first rows of this thread's stretch of the next product, so that they come while it waits."""
    first = a.next + a.next_panels * work.thread // work.threads * 8 * a.next_row_bytes
    with c.when(a.next.differs(0)), c.range(0, 64) as row:
        start = first + row * a.next_row_bytes
        with c.range(start, start + c.min(a.next_row_bytes, 2048), 64) as line:
            c.prefetch(line, near=False)


def slots(form: Blocks32 | Blocks256) -> int:
    """Vectors that one unpacked block takes in scratch: groups, scales, pairs, d and dmin (m, or the other d)."""
    return 10 * form.n_parts if isinstance(form, Blocks32) else 64 + form.n_parts + form.n_pairs + 2


def unpack(c: Code, form: Blocks32 | Blocks256, rows: Sequence[Value], to: Value, slot: int) -> None:
    """Stores one unpacked block of eight rows, a vector every `slot` bytes."""
    if isinstance(form, Blocks32):
        for part, small in enumerate(form.unpack(c, rows)):
            last = small.m if small.d_high is None else small.d_high
            for g, group in enumerate([*small.groups, small.d, *([] if last is None else [last])]):
                c.store(to + slot * (10 * part + g), group)
        return
    block, g = form.unpack(c, rows), 0
    for s, (groups, scale) in enumerate(block.parts):
        for group in groups:
            c.store(to + slot * g, group)
            g += 1
        if scale is not None:
            c.store(to + slot * (64 + s), scale)
    at = 64 + form.n_parts
    for p, vector in enumerate([*block.pairs, block.d, *([] if block.dmin is None else [block.dmin])]):
        c.store(to + slot * (at + p), vector)


def step_panel(c: Code, form: Blocks32 | Blocks256, panel: Value, x: Columns, sums: Sequence[Var]) -> None:
    """As `_step32` and `_step256`, from scratch, for as many rows as the sums have lanes."""
    n, lanes = len(sums), sums[0].type.lanes
    slot = 4 * lanes
    i8, i16, i32, f32 = Type("i8", 4 * lanes), Type("i16", 2 * lanes), Type("i32", lanes), Type("f32", lanes)
    if isinstance(form, Blocks32):
        for part in range(form.n_parts):
            at = panel + slot * (10 * part)
            groups = [c.load(i8, at + slot * g) for g in range(8)]
            m = c.load(f32, at + slot * 9) if form.has_min else None
            high = c.load(f32, at + slot * 9) if form.has_halves else None
            block = Block32(groups, c.load(f32, at + slot * 8), m, high)
            _step32(c, form, block, x.behind(part * BYTES_PER_COLUMN[32]), sums)
        return
    per_part, n_parts = form.part // 4, form.n_parts
    totals = [c.var(c.const(i32, 0)) for _ in sums]
    scale_type = c.lowering.scale(c, c.const(i32, 0)).type
    with c.range(0, n_parts) as s:
        values = [t.value for t in totals]
        at = panel + s * (slot * per_part)
        groups = [c.load(i8, at + slot * g) for g in range(per_part)]
        x_part = x.behind(s * (4 * per_part))
        addresses = [[x_part.address(4 * g, j) for j in range(n)] for g in range(per_part)]
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
    finish256(c, form, big, [t.value for t in totals], x, sums, form.zero(c.lowering))


def add_panel(
    c: Code,
    form: Blocks32 | Blocks256,
    scratch: Value,
    blocks: Value,
    x: Columns,
    targets: Sequence[Value],
    on: Value,
    panel_rows: int,
    meanwhile: Callable[[Value], None] = lambda block: None,
) -> None:
    """Products of a panel's blocks in scratch and the columns at x, stored to `targets`; `on`: added to what is there.

    `meanwhile` may do something beside each block.
    """
    size, per_column, f32 = 4 * panel_rows * slots(form), form.column_bytes, Type("f32", panel_rows)
    sums = [c.var(c.const(f32, 0.0)) for _ in targets]
    with c.when(on):
        for total, target in zip(sums, targets, strict=True):
            total.value = c.load(f32, target)
    with c.range(0, blocks) as i:
        meanwhile(i)
        step_panel(c, form, scratch + i * size, x.behind(i * per_column), sums)
    for total, target in zip(sums, targets, strict=True):
        c.store(target, total.value)


@kernel(*_FIELDS)
def matmul_many(c: Code, a: SimpleNamespace, work: Work, *, weights: str, panel_rows: int) -> None:
    """y for any number of columns: x in groups of `Lowering.columns`, the last group of 4 where that holds the rest.

    `panel_rows`, 8 or 16: rows unpacked together, the lanes of the vectors that are multiplied.
    """
    form = in_blocks(TensorType[weights])
    per_column, size = form.column_bytes, 4 * panel_rows * slots(form)
    stretch = STRETCH * 8 // panel_rows // form.block
    scratch, nowhere = c.scratch(stretch * size), c.scratch(4 * panel_rows)
    wide = c.lowering.columns
    n_wide = a.n_columns // wide
    rest = a.n_columns - n_wide * wide
    if wide > 4:
        n_wide = n_wide + (rest > 4).zext(n_wide.type)
    x_column = a.n_blocks * per_column

    def columns(first_row: Value, start: Value, blocks: Value, column: Value, n: int) -> None:
        """One group of n columns over the blocks in scratch."""
        x = Together(a.x + column * x_column, n).behind(start * per_column)
        targets = []
        for j in range(n):
            inside = column + j < a.n_columns
            targets.append(c.select(inside, a.y + (column + j) * a.y_stride + first_row * 4, nowhere))
        add_panel(c, form, scratch, blocks, x, targets, start > 0, panel_rows)

    def panel(first: Value) -> None:
        """A panel's rows and all columns; sums wait in y from one stretch to the next."""
        eights = [row_addresses(a, first + eight) for eight in range(0, panel_rows, 8)]
        with c.range(0, a.n_blocks, stretch) as start:
            blocks = c.min(a.n_blocks - start, stretch)
            with c.range(0, blocks) as i:
                for number, rows in enumerate(eights):
                    here = [row + (start + i) * form.block_bytes for row in rows]
                    unpack(c, form, here, scratch + i * size + 32 * number, 4 * panel_rows)
            with c.range(0, n_wide) as group:
                columns(first, start, blocks, group * wide, wide)
            if wide > 4:
                with c.when(n_wide * wide < a.n_columns):
                    columns(first, start, blocks, n_wide * wide, 4)
            else:
                with c.when(rest > 0):
                    columns(first, start, blocks, n_wide * wide, wide)

    # a last panel of fewer rows shares some with the one before it: one thread does both, or it would take up sums of
    # the other's that are half done
    panels = a.n_rows // panel_rows
    with c.shares(work, panels, a.share) as number:
        start = number * panel_rows
        stop = c.select((number + 1).equals(panels), a.n_rows, start + panel_rows)
        with c.range(start, stop, panel_rows) as first:
            panel(c.min(first, a.n_rows - panel_rows))
