"""Matrix products of many columns with AMX: one instruction multiplies 16 rows of weights with 16 columns.

Integers are exact, and float operations are those of `matmul.py` in the same order, so the bits are the same. Weights
are unpacked to signed bytes without their zero point, a stretch of K at a time; they stay in L1 for all columns.

- Blocks of 32 weights: each is a product of its own, because each has a scale of its own.
- Super-blocks: a weight times the scale of its sub-block fits 16 bits. The low and the high bytes of these products
  are multiplied separately, so that tile registers sum a whole super-block: Σ scale·w·x = Σ low·x + 256·Σ high·x.

Sums leave the tile registers through memory: a block's sums are used while the next block is multiplied. Shortly after
each tile instruction the CPU multiplies and converts vectors at half its rate, so the code does little of that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from llvmlite import ir

from llamado.devices.kernel import kernel
from llamado.devices.kernels.activations import BYTES_PER_COLUMN, TILE
from llamado.devices.kernels.formats import in_blocks
from llamado.devices.kernels.formats.format import Block256, Blocks32, Blocks256
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.kernels.matmul import Columns, RowPanel, finish32, finish256
from llamado.devices.simd import Code, Type, Value, Var, Work
from llamado.gguf.types import TensorType

_STRETCH = {32: 512, 256: 256}
"""Weights of each row that are unpacked at a time, by the block size of their columns."""
PANELS = 4
"""Most panels of sixteen rows that are unpacked together: with a group of columns they fill L1."""

_ROW = 64
"""Bytes of a row of a tile."""
_FULL = TILE * _ROW

_MAGIC = 1.5 * 2**23
"""An f32 whose bits plus an integer of at most 22 bits are the f32 of this number plus that integer."""

_I16, _I32, _F32 = Type("i16", 2 * TILE), Type("i32", TILE), Type("f32", TILE)


class Tiles:
    """The tile registers, addressed by number."""

    def __init__(self, c: Code, shapes: dict[int, tuple[int, int]]) -> None:
        """`shapes`: rows, and bytes of a row, of each register, as in LDTILECFG's palette 1."""
        self._c = c
        layout = bytearray(64)
        layout[0] = 1
        for number, (rows, row_bytes) in shapes.items():
            layout[16 + 2 * number], layout[48 + number] = row_bytes, rows
        self._do("ldtilecfg", c.table("tile_shapes", bytes(layout)))

    def _do(self, name: str, *operands: int | Value) -> None:
        """Emit an instruction with register numbers, then an address, then a stride."""
        values: list[Any] = [ir.Constant(ir.IntType(8), operand) for operand in operands if isinstance(operand, int)]
        for k, value in enumerate(operand for operand in operands if isinstance(operand, Value)):
            values.append(self._c.pointer(value) if k == 0 else value)
        self._c.intrinsic(f"llvm.x86.{name}", None, values)

    def load(self, to: int, address: Value, stride: int = _ROW) -> None:
        """Fill a register with rows that begin `stride` bytes apart."""
        self._do("tileloadd64", to, address, self._c.i64(stride))

    def store(self, address: Value, register: int) -> None:
        """Store a register's rows consecutively."""
        self._do("tilestored64", register, address, self._c.i64(_ROW))

    def clear(self, register: int) -> None:
        self._do("tilezero", register)

    def multiply(self, total: int, x: int, w: int, *, signed: bool) -> None:
        """total[j] += Σ of four signed bytes of x[j] times four (signed or unsigned) bytes of each row of w."""
        self._do("tdpbssd" if signed else "tdpbsud", total, x, w)

    def release(self) -> None:
        """Release the registers, so that the OS need not save them any more."""
        self._do("tilerelease")


class _Scales(Columns):
    """The data after the bytes of columns in tiles, from column `first` on."""

    def __init__(self, x: Value, first: int, n: int) -> None:
        self.x, self.first, self.n = x, first, n

    def address(self, at: Value | int, j: int) -> Value:
        return self.x + (at * TILE + 4 * (self.first + j))

    def from_byte(self, at: Value | int) -> Columns:
        return _Scales(self.x + at * TILE, self.first, self.n)


class Steps(ABC):
    """Products of sixteen rows and sixteen columns, block after block."""

    size: int
    """Bytes of a block of sixteen unpacked rows."""
    column_bytes: int
    """Bytes of a column for one block."""
    sums_bytes: int
    """Bytes of the sums of one block."""
    ahead: int
    """Number of blocks between the one that is multiplied and the one whose products are used."""
    tiles: Tiles

    def __init__(self, c: Code) -> None:
        self._c = c

    @abstractmethod
    def unpack(self, panel: Panel, to: Value) -> None:
        """Unpack the blocks of sixteen rows."""

    @abstractmethod
    def _multiply(self, w: Value, x: Value, to: Value, between: Callable[[int], None]) -> None:
        """Multiply a block and store its sums; call `between` with 0 … 3 meanwhile."""

    @abstractmethod
    def _finish(self, w: Value, x: Value, found: Value, first: int, sums: Sequence[Var]) -> None:
        """Add the stored sums of a block's product to those of the columns from `first` on."""

    def run(
        self,
        w: Value,
        x: Value,
        n: Value,
        panels: Value,
        panel_bytes: int,
        groups: Value,
        group_bytes: Value,
        begin: Callable[[Value, Value], Sequence[Var]],
        end: Callable[[Value, Value, Sequence[Var]], None],
    ) -> None:
        """Add products of `n` blocks in order, for each group of columns with each panel of rows.

        `begin` returns the initial sums of a group and a panel, `end` receives the final ones. Blocks are multiplied
        `ahead` of the one whose products are used, across panels and groups.
        """
        c, x_bytes = self._c, self.column_bytes * TILE
        bound = (self.ahead + 1) * self.sums_bytes
        places = c.scratch(bound)
        made, used, i, panel_ahead, group_ahead = (c.var(c.i64(0)) for _ in range(5))
        next_w, next_x = c.var(w), c.var(x)

        def turn(place: Var) -> None:
            after = place.value + self.sums_bytes
            place.value = c.select(after.equals(bound), c.i64(0), after)

        def multiply(between: Callable[[int], None]) -> None:
            """Multiply the next block; after the last one, an unused block of the first group."""
            self._multiply(next_w.value, next_x.value, places + made.value, between)
            turn(made)
            panel_ends = (i.value + 1).equals(n)
            i.value = c.select(panel_ends, c.i64(0), i.value + 1)
            panel = c.select(panel_ends, panel_ahead.value + 1, panel_ahead.value)
            group_ends = panel.equals(panels)
            panel_ahead.value = c.select(group_ends, c.i64(0), panel)
            group = c.select(group_ends, group_ahead.value + 1, group_ahead.value)
            group_ahead.value = c.select(group.equals(groups), c.i64(0), group)
            next_w.value = w + panel_ahead.value * panel_bytes + i.value * self.size
            next_x.value = x + group_ahead.value * group_bytes + i.value * x_bytes

        with c.range(0, self.ahead):
            multiply(lambda quarter: None)
        with c.range(0, groups) as group, c.range(0, panels) as panel:
            sums = begin(group, panel)
            with c.range(0, n) as block:
                at_w, at_x = w + panel * panel_bytes + block * self.size, x + group * group_bytes + block * x_bytes

                def finish(quarter: int) -> None:
                    first, last = TILE // 4 * quarter, TILE // 4 * (quarter + 1)
                    self._finish(at_w, at_x, places + used.value, first, sums[first:last])

                multiply(finish)
                turn(used)
            end(group, panel, sums)


class Steps32(Steps):
    """Blocks of 32 weights: eight groups of four | d | m or d of the last sixteen."""

    size, column_bytes, ahead = 10 * _ROW, BYTES_PER_COLUMN[32], 2

    def __init__(self, c: Code, form: Blocks32) -> None:
        super().__init__(c)
        self._form = form
        self._pieces = 2 if form.has_halves else 1
        self.sums_bytes = self._pieces * _FULL
        groups = 8 // self._pieces
        self.tiles = Tiles(c, {0: (TILE, _ROW), 1: (TILE, _ROW), 2: (TILE, 4 * groups), 3: (groups, _ROW)})
        self._magic = c.table("magic", np.full(_FULL // 4, _MAGIC, np.float32).tobytes())

    def unpack(self, panel: Panel, to: Value) -> None:
        c, zero = self._c, self._form.zero(self._c.lowering)
        for part, block in enumerate(self._form.unpack(c, panel)):
            last = block.m if block.d_high is None else block.d_high
            groups = [group + -zero for group in block.groups] if zero else block.groups
            for g, vector in enumerate([*groups, block.d, *([] if last is None else [last])]):
                c.store(to + (self.size * part + _ROW * g), vector)

    def _multiply(self, w: Value, x: Value, to: Value, between: Callable[[int], None]) -> None:
        width = 32 // self._pieces
        for piece in range(self._pieces):
            self.tiles.load(piece, self._magic)
            self.tiles.load(2, x + width * piece, 32)
            self.tiles.load(3, w + 2 * _ROW * width // 8 * piece)
            self.tiles.multiply(piece, 2, 3, signed=True)
            self.tiles.store(to + _FULL * piece, piece)
        for quarter in range(4):
            between(quarter)

    def _finish(self, w: Value, x: Value, found: Value, first: int, sums: Sequence[Var]) -> None:
        c, n = self._c, len(sums)
        d, last = (c.load(_F32, w + _ROW * g) for g in (8, 9))
        totals = [
            [c.load(_F32, found + (_FULL * piece + _ROW * (first + j))) - _MAGIC for j in range(n)]
            for piece in range(self._pieces)
        ]
        found_d = list(zip(totals, [d, last], strict=False))
        finish32(c, found_d, last if self._form.has_min else None, _Scales(x, first, n), sums)


class Steps256(Steps):
    """Super-blocks: 64 groups of low bytes | 64 of high ones | pairs of mins | d | dmin."""

    column_bytes, ahead = BYTES_PER_COLUMN[256], 1

    def __init__(self, c: Code, form: Blocks256) -> None:
        super().__init__(c)
        self._form = form
        self._planes = 2 if form.has_scales else 1
        self._tail = 4 * _FULL * self._planes
        self.size, self.sums_bytes = self._tail + _ROW * (form.n_pairs + 2), self._planes * _FULL
        self.tiles = Tiles(c, dict.fromkeys(range(5), (TILE, _ROW)))

    def unpack(self, panel: Panel, to: Value) -> None:
        c, zero = self._c, self._form.zero(self._c.lowering)
        block, g = self._form.unpack(c, panel), 0
        for groups, scale in block.parts:
            factor = None
            if scale is not None:
                low = scale & 0xFFFF
                factor = (low | (low << 16)).as_lanes("i16")
            for group in groups:
                if factor is None:
                    c.store(to + _ROW * g, group + -zero)
                else:
                    words = group.bits(factor.type)
                    even, odd = (words & 0xFF) * factor, (words >> 8) * factor
                    if zero:
                        even, odd = even - factor * zero, odd - factor * zero
                    c.store(to + _ROW * g, (even & 0xFF) | (odd << 8))
                    c.store(to + (4 * _FULL + _ROW * g), (even >> 8) | (odd & -256))
                g += 1
        pairs = block.pairs if self._form.has_min else []
        for p, vector in enumerate([*pairs, block.d, *([] if block.dmin is None else [block.dmin])]):
            c.store(to + (self._tail + _ROW * p), vector)

    def _multiply(self, w: Value, x: Value, to: Value, between: Callable[[int], None]) -> None:
        for plane in range(self._planes):
            self.tiles.clear(plane)
        for quarter in range(4):
            self.tiles.load(2, x + _FULL * quarter)
            for plane in range(self._planes):
                self.tiles.load(3 + plane, w + _FULL * (4 * plane + quarter))
                self.tiles.multiply(plane, 2, 3 + plane, signed=plane == self._planes - 1)
            between(quarter)
        for plane in range(self._planes):
            self.tiles.store(to + _FULL * plane, plane)

    def _finish(self, w: Value, x: Value, found: Value, first: int, sums: Sequence[Var]) -> None:
        c, n, form = self._c, len(sums), self._form
        totals = [c.load(_I32, found + _ROW * (first + j)) for j in range(n)]
        if self._planes == 2:
            high = [c.load(_I32, found + (_FULL + _ROW * (first + j))) for j in range(n)]
            totals = [low + (more << 8) for low, more in zip(totals, high, strict=True)]
        tail = w + self._tail
        pairs = [c.load(_I16, tail + _ROW * p) for p in range(form.n_pairs)] if form.has_min else []
        at = tail + _ROW * len(pairs)
        block = Block256(c.load(_F32, at), c.load(_F32, at + _ROW) if form.has_min else None, pairs)
        finish256(c, form, block, totals, _Scales(x, first, n), sums, 0)


class Product:
    """Panels of a matrix times groups of columns in tiles, in one kernel."""

    def __init__(self, c: Code, type_: TensorType) -> None:
        self._c, self._form = c, in_blocks(type_)
        form = self._form
        self._stretch, self._parts = _STRETCH[form.columns] // form.block, form.block // form.columns
        self._step = Steps32(c, form) if isinstance(form, Blocks32) else Steps256(c, form)
        self._panel_bytes = self._stretch * self._parts * self._step.size
        self._scratch, self.nowhere = c.scratch(PANELS * self._panel_bytes), c.scratch(_ROW)
        self.column_bytes = form.column_bytes

    def run(
        self,
        a: SimpleNamespace,
        unit: Value,
        x: Value,
        n_columns: Value,
        target: Callable[[Value, Value], Value],
    ) -> None:
        """Multiply the panels of a unit with all columns at x.

        `a`: w, row_bytes, n_blocks, n_rows, and `panels`, the number of panels of sixteen rows (up to PANELS) in a
        unit. `target(row, column)` is the address of a sum; sums of rows are adjacent.
        """
        c, n_panels = self._c, a.n_rows // TILE
        number = unit * a.panels
        panels = c.min(n_panels - number, a.panels)
        # a last panel of fewer rows shares some with the one before it, so it begins when that one's sums are complete
        more = ((number + panels).equals(n_panels) & (a.n_rows > n_panels * TILE)).zext(a.n_rows.type)
        with c.range(0, more + 1) as turn, c.range(0, a.n_blocks, self._stretch) as start:
            first = c.select(turn > 0, a.n_rows - TILE, number * TILE)
            self._multiply(a, first, c.select(turn > 0, c.i64(1), panels), start, x, n_columns, target)

    def _multiply(
        self,
        a: SimpleNamespace,
        first: Value,
        panels: Value,
        start: Value,
        x: Value,
        n_columns: Value,
        target: Callable[[Value, Value], Value],
    ) -> None:
        """Process a stretch of K; sums are kept at their targets from one stretch to the next."""
        c, step = self._c, self._step
        blocks = c.min(a.n_blocks - start, self._stretch)
        with c.range(0, panels) as panel:
            rows = RowPanel(c, a.w + (first + panel * TILE) * a.row_bytes, a.row_bytes, TILE)
            with c.range(0, blocks) as i:
                at = self._scratch + panel * self._panel_bytes + i * (self._parts * step.size)
                step.unpack(rows.block(start + i, self._form.block_bytes), at)

        def targets(group: Value, panel: Value) -> list[Value]:
            columns, row = [group * TILE + j for j in range(TILE)], first + panel * TILE
            return [c.select(j < n_columns, target(row, c.min(j, n_columns - 1)), self.nowhere) for j in columns]

        def begin(group: Value, panel: Value) -> list[Var]:
            sums = [c.var(c.const(_F32, 0.0)) for _ in range(TILE)]
            with c.when(start > 0):
                for total, at in zip(sums, targets(group, panel), strict=True):
                    total.value = c.load(_F32, at)
            return sums

        def end(group: Value, panel: Value, sums: Sequence[Var]) -> None:
            for total, at in zip(sums, targets(group, panel), strict=True):
                c.store(at, total.value)

        groups, group_bytes = (n_columns + (TILE - 1)) // TILE, a.n_blocks * (self.column_bytes * TILE)
        at_x = x + start * (self.column_bytes * TILE)
        step.run(self._scratch, at_x, blocks * self._parts, panels, self._panel_bytes, groups, group_bytes, begin, end)

    def close(self) -> None:
        """Release the tile registers."""
        self._step.tiles.release()


def panels_together(n_rows: int, n_threads: int) -> int:
    """Panels that are unpacked together: fewer than fit if threads would get too few shares."""
    return max(1, min(PANELS, n_rows // TILE // (4 * n_threads)))


def units(a: SimpleNamespace) -> Value:
    """Number of units that the rows of a matrix are divided into."""
    n_panels: Value = a.n_rows // TILE
    panels: Value = a.panels
    return (n_panels + panels - 1) // panels


@kernel("w", "row_bytes", "n_blocks", "n_rows", "x", "n_columns", "y", "y_stride", "share", "panels")
def matmul_tiles(c: Code, a: SimpleNamespace, work: Work, *, weights: str) -> None:
    """y for any number of columns, which are in tiles."""
    product = Product(c, TensorType[weights])
    with c.shares(work, units(a), a.share) as unit:
        product.run(a, unit, a.x, a.n_columns, lambda row, column: a.y + column * a.y_stride + row * 4)
    product.close()
