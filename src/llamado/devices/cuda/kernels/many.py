"""Products of quantized weights with many columns, on tensor cores.

A block has a tile of rows and columns, and takes one unit of 256 weights of each row at a time. Asynchronous copies
bring weights and columns. Each thread unpacks a part of one row to signed bytes, with its scales beside them. Then the
warps multiply matrices of 16 rows, 8 columns and 16 or 32 weights: exact integer sums, which get their scales and are
added in the order of K.

Shared memory: two stages of weights as in the file and of columns; unpacked rows; a record of scales for each row; the
global addresses of each column and of its results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

from llamado.devices.cuda.kernel import kernel
from llamado.devices.cuda.kernels.terms import Form, parts32, unit_bytes
from llamado.devices.cuda.panel import WIDEST, ThreadPanel, ThreadWords, of_thread, register_of, thread_code
from llamado.devices.cuda.simt import WARP, Register, SimtCode, Variable
from llamado.devices.kernels import activations as acts
from llamado.devices.kernels.activations import UNIT, UNIT_BYTES
from llamado.devices.kernels.formats import in_blocks
from llamado.devices.kernels.formats.format import Block256, Blocks32, Blocks256
from llamado.devices.kernels.matmul import scaled256, terms32
from llamado.devices.simd import F32, I32, I64, Value
from llamado.gguf.types import TensorType

ROWS, COLUMNS = 16, 8
"""Rows and columns of a warp's matrix product."""

_ROW_BYTES = UNIT + 16
"""An unpacked row: eight rows begin in different banks."""
_RECORD = 112
"""Scales of a row, in different banks for eight rows."""
_MINS, _D, _DMIN = 64, 80, 84
_SECOND = 32
_EVEN_BYTES = 0x6420
"""Selector of `permute` for the lower bytes of four halves."""
_ADDRESSES = 16
"""Bytes for the addresses of a column and of its results."""

Column = Callable[[Register], tuple[Register, Register]]
"""Returns the address of the column of a number in the tile, and that of its results."""
Fragments = Sequence[Sequence[Register]]
"""A warp's matrices of 16 rows and 32 weights."""
Adder = Callable[[Fragments, Sequence[Register], Register, Sequence[Variable]], None]
"""Adds the products of a warp's rows with eight columns: fragments of weights and columns, the address of the first
column, and the thread's four sums.
"""


@dataclass(frozen=True)
class ManyTile:
    """Warps of a block (an even number), of 16 rows each; columns, a multiple of 8; units in shared memory. `align`,
    `ragged`: see `FewTile`.
    """

    weights: str
    warps: int
    columns: int
    stages: int
    align: int
    ragged: bool

    @property
    def form(self) -> Form:
        return in_blocks(TensorType[self.weights])

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def rows(self) -> int:
        return ROWS * self.warps

    @property
    def pieces(self) -> int:
        """Pieces of 16 bytes, at addresses that are multiples of 16, which cover a unit of weights."""
        return -(-(unit_bytes(self.form) + WIDEST - self.align) // WIDEST)

    @property
    def area(self) -> int:
        """Bytes of shared memory for a unit of weights: an odd number of pieces, for different banks."""
        return WIDEST * ((self.pieces + (self.align < WIDEST)) | 1)

    @property
    def stage_bytes(self) -> int:
        return self.rows * self.area + self.columns * UNIT_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.rows * (_ROW_BYTES + _RECORD) + self.columns * _ADDRESSES


@kernel("w", "row_bytes", "n_rows", "n_units", "n_parts", "x", "x_step", "n_columns", "y", "y_step")
def matmul_many(c: SimtCode, a: SimpleNamespace, *, tile: ManyTile) -> None:
    """y = W·x. Blocks: rows (x) and columns (y). Steps: bytes from one column to the next. `n_parts`: times 32 weights
    of a row, for those that do not end with a whole unit.
    """
    first = (c.block("y") * tile.columns).to(I64)

    def column(number: Register) -> tuple[Register, Register]:
        at = first + number.to(I64)
        return a.x + at * a.x_step, a.y + at * a.y_step

    tile_of(c, tile, a).multiply(a.w, column, (a.n_columns - first).to(I32))


def tile_of(c: SimtCode, tile: ManyTile, a: SimpleNamespace) -> _Tile:
    """Return the work of one block. `a` has the shape of the weights: row_bytes, n_rows, n_units, n_parts."""
    return (_Tile256 if isinstance(tile.form, Blocks256) else _Tile32)(c, tile, a)


class _Tile(ABC):
    """The work of one block."""

    def __init__(self, c: SimtCode, tile: ManyTile, a: SimpleNamespace) -> None:
        """`a` has the shape of the weights: row_bytes, n_rows, n_units, n_parts."""
        self._c, self._tile, self._code = c, tile, thread_code(c)
        self.form: Any = tile.form
        self._row_bytes, self._n_rows = a.row_bytes, a.n_rows.to(I32)
        self._n_units, self._n_parts = a.n_units.to(I32), a.n_parts.to(I32)
        self._n_columns = c.i32(tile.columns)
        self._thread = c.thread()
        self._lane, self._warp = self._thread & (WARP - 1), self._thread >> 5
        self._first = c.block() * tile.rows
        self._stages = c.shared()
        self._unpacked = self._stages + tile.stages * tile.stage_bytes
        self._records = self._unpacked + tile.rows * _ROW_BYTES
        self._addresses = self._records + tile.rows * _RECORD

    @abstractmethod
    def _unpack_half(self, words: ThreadWords, half: int, row: Register, record: Register) -> None:
        """Unpack a half of a unit of a row."""

    @abstractmethod
    def _adder(self, unit: Register, records: Sequence[Register]) -> Adder:
        """Return a function that adds the products of a unit. `records`: those of the thread's two rows."""

    def multiply(self, w: Register, column: Column, n_columns: Register) -> None:
        """Multiply a matrix at `w` with one tile of columns, or with the first `n_columns` of it if these are less."""
        c, tile = self._c, self._tile
        self._n_columns = c.min(n_columns, tile.columns)
        with c.range(self._thread, self._n_columns, tile.threads) as number:
            to = self._addresses + number * _ADDRESSES
            for i, address in enumerate(column(number)):
                c.store(to + 8 * i, address)
        c.barrier()
        sums = [[c.var(c.f32(0.0)) for _ in range(4)] for _ in range(tile.columns // COLUMNS)]
        for early in range(tile.stages - 1):
            with c.when(self._n_units > early):
                self._fetch(w, c.i32(early))
            c.commit()
        with c.range(c.i32(0), self._n_units) as unit:
            c.wait(tile.stages - 2)
            c.barrier()
            ahead = unit + (tile.stages - 1)
            with c.when(ahead < self._n_units):
                self._fetch(w, ahead)
            c.commit()
            self._unpack(w, unit)
            c.barrier()
            self._add(unit, sums)
        self._store(sums)
        c.barrier()  # a next tile of columns uses the same memory

    # --- weights and columns as they are -----------------------------------------------------------------------------
    def _row(self, w: Register, number: Register) -> Register:
        """The address of the row of this number in the tile; of the last row if there is none."""
        at: Register = w + self._c.min(self._first + number, self._n_rows - 1).to(I64) * self._row_bytes
        return at

    def _stage(self, unit: Register) -> Register:
        """The shared address of a unit of all rows, which the columns follow."""
        return self._stages + unit % self._tile.stages * self._tile.stage_bytes

    def _fetch(self, w: Register, unit: Register) -> None:
        """Begin to copy a unit of all rows and columns."""
        c, tile = self._c, self._tile
        to = self._stage(unit)
        offset = unit.to(I64) * unit_bytes(tile.form)
        # loops, because addresses of all pieces would take too many registers
        with c.range(self._thread, tile.rows * tile.pieces, tile.threads) as piece:
            number, part = piece // tile.pieces, piece % tile.pieces
            row = self._row(w, number)
            source = ((row + offset) & -WIDEST) + part.to(I64) * WIDEST
            with c.when(source < row + self._row_bytes):
                c.copy16(to + number * tile.area + part * WIDEST, source)
        pieces = UNIT_BYTES // WIDEST
        with c.range(self._thread, self._n_columns * pieces, tile.threads) as piece:
            column, part = piece // pieces, piece % pieces
            x = c.load(I64, self._addresses + column * _ADDRESSES) + unit.to(I64) * UNIT_BYTES
            c.copy16(to + tile.rows * tile.area + piece * WIDEST, x + part.to(I64) * WIDEST)

    # --- unpacking ---------------------------------------------------------------------------------------------------
    def _unpack(self, w: Register, unit: Register) -> None:
        """Unpack a unit of all rows, with two threads for each."""
        c, tile = self._c, self._tile
        number, half = self._thread % tile.rows, self._thread // tile.rows
        at = self._stage(unit) + number * tile.area
        if tile.align < WIDEST:
            start = self._row(w, number) + unit.to(I64) * unit_bytes(tile.form)
            at = at + (start & (WIDEST - 1)).to(I32)
        row, record = self._unpacked + number * _ROW_BYTES, self._records + number * _RECORD
        for mine in range(2):
            with c.when(half.equals(mine)):
                self._unpack_half(ThreadWords(c, at, tile.align), mine, row, record)

    def _store_groups(self, groups: Sequence[Value], to: Register) -> None:
        zero = self._tile.form.zero(self._code.lowering)
        words = [register_of(group - zero if zero else group) for group in groups]
        for i in range(0, len(words), 4):
            self._c.store_words(to + 4 * i, words[i : i + 4])

    # --- products ----------------------------------------------------------------------------------------------------
    def _add(self, unit: Register, sums: Sequence[Sequence[Variable]]) -> None:
        """Add the products of a unit. A thread has rows g and g + 8 of its warp's, with g = lane // 4, of columns 2·t
        and 2·t + 1 of each eight, with t = lane % 4.
        """
        c, first, lane = self._c, self._warp * ROWS, self._lane
        x = self._stage(unit) + self._tile.rows * self._tile.area
        at = self._unpacked + (first + (lane & 15)) * _ROW_BYTES + (lane >> 4) * 16
        weights = [c.load_matrices(at + 32 * s) for s in range(UNIT // 32)]
        add = self._adder(unit, [self._records + (first + (lane >> 2) + 8 * i) * _RECORD for i in range(2)])
        for n, totals in enumerate(sums):
            columns = x + COLUMNS * n * UNIT_BYTES
            at = columns + (lane & 7) * UNIT_BYTES + (lane >> 3) * 16
            with c.when(self._n_columns > COLUMNS * n):
                numbers = [word for s in range(0, UNIT, 64) for word in c.load_matrices(at + s)]
                add(weights, numbers, columns, totals)

    def _mine(self, columns: Register) -> list[Register]:
        """The thread's two columns of eight."""
        return [columns + ((self._lane & 3) * 2 + j) * UNIT_BYTES for j in range(2)]

    def _store(self, sums: Sequence[Sequence[Variable]]) -> None:
        c = self._c
        rows = [self._first + self._warp * ROWS + (self._lane >> 2) + 8 * i for i in range(2)]
        for n, totals in enumerate(sums):
            for j in range(2):
                column = (self._lane & 3) * 2 + (COLUMNS * n + j)
                with c.when(column < self._n_columns):
                    y = c.load(I64, self._addresses + column * _ADDRESSES + 8)
                    for i, row in enumerate(rows):
                        with c.when(row < self._n_rows):
                            c.store(y + row.to(I64) * 4, totals[2 * i + j].value)


class _Tile32(_Tile):
    """Weights in blocks of 32, or of several times 32. A record has d of each 32, then m or the other d."""

    form: Blocks32

    def _unpack_half(self, words: ThreadWords, half: int, row: Register, record: Register) -> None:
        for number, block in parts32(self._code, self.form, words, range(4 * half, 4 * half + 4)):
            self._store_groups(block.groups, row + 32 * number)
            self._c.store(record + 4 * number, register_of(block.d))
            second = block.m if block.d_high is None else block.d_high
            if second is not None:
                self._c.store(record + (_SECOND + 4 * number), register_of(second))

    def _adder(self, unit: Register, records: Sequence[Register]) -> Adder:
        c, form = self._c, self.form
        ds = [self._floats(record) for record in records]
        seconds = [self._floats(record + _SECOND) if form.has_min or form.has_halves else [] for record in records]
        nothing = [c.i32(0)] * 4

        def add(weights: Fragments, x: Sequence[Register], columns: Register, totals: Sequence[Variable]) -> None:
            mine = self._mine(columns)
            x_ds = [self._floats(column + acts.UNIT_D) for column in mine]
            x_sums = [self._floats(column + acts.UNIT_D_SUM) if form.has_min else [] for column in mine]
            for s, w in enumerate(weights):
                if form.has_halves:
                    parts = [c.mma(w[2 * h : 2 * h + 2], x[2 * s + h : 2 * s + h + 1], nothing) for h in range(2)]
                else:
                    parts = [c.mma(w, x[2 * s : 2 * s + 2], nothing)]
                for i, total in enumerate(totals):
                    row, column = divmod(i, 2)
                    own = [ds[row][s], *(seconds[row][s : s + 1] if form.has_halves else [])]
                    found = [(of_thread(self._code, p[i]), d) for p, d in zip(parts, own, strict=True)]
                    m, x_sum = (seconds[row][s], x_sums[column][s]) if form.has_min else (None, None)
                    value = total.value
                    for a, b in terms32(found, m, x_ds[column][s], x_sum):
                        added = c.fma(register_of(a), register_of(b), value)
                        inside = unit * 8 + s < self._n_parts
                        value = c.select(inside, added, value) if self._tile.ragged else added
                    total.value = value

        return add

    def _floats(self, at: Register) -> list[Value]:
        """Eight f32 of a record or a unit."""
        words = [word for i in range(0, 8, 4) for word in self._c.load_words(at + 4 * i, 4)]
        return [of_thread(self._code, word.bits(F32)) for word in words]


class _Tile256(_Tile):
    """Weights in super-blocks. A record has a word for each scale, bytes of the minimums, d and dmin."""

    form: Blocks256

    def _unpack_half(self, words: ThreadWords, half: int, row: Register, record: Register) -> None:
        c, form = self._c, self.form
        block, most = form.unpack(self._code, ThreadPanel(self._code, words, 0)), form.n_parts // 2
        for number, (groups, scale) in enumerate(islice(block.parts, most * (half + 1))):
            if number >= most * half:
                self._store_groups(groups, row + form.part * number)
                if scale is not None:
                    c.store(record + 4 * number, register_of(scale))
        if half:
            return
        c.store(record + _D, register_of(block.d))
        if block.dmin is not None:
            c.store(record + _DMIN, register_of(block.dmin))
            pairs = [register_of(pair) for pair in block.pairs]
            mins = [c.permute(pairs[i], pairs[i + 1], _EVEN_BYTES) for i in range(0, len(pairs), 2)]
            c.store_words(record + _MINS, (mins + [c.i32(0)] * 2)[:4])

    def _adder(self, unit: Register, records: Sequence[Register]) -> Adder:
        c, form, nothing = self._c, self.form, [self._c.i32(0)] * 4
        scales = [
            [word for i in range(0, form.n_parts, 4) for word in c.load_words(record + 4 * i, 4)]
            if form.has_scales else []
            for record in records
        ]  # fmt: skip
        ds = [of_thread(self._code, c.load(F32, record + _D)) for record in records]
        dmins: list[Value | None] = [None, None]
        mins = nothing[:2]
        if form.has_min:
            dmins[:] = [of_thread(self._code, c.load(F32, record + _DMIN)) for record in records]
            mins = [c.load(I32, record + (self._lane & 3) * 4 + _MINS) for record in records]

        def add(weights: Fragments, x: Sequence[Register], columns: Register, totals: Sequence[Variable]) -> None:
            found = nothing
            for s, w in enumerate(weights):
                if form.part == 16:
                    parts = [c.mma(w[2 * h : 2 * h + 2], x[2 * s + h : 2 * s + h + 1], nothing) for h in range(2)]
                else:
                    parts = [c.mma(w, x[2 * s : 2 * s + 2], found if not form.has_scales else nothing)]
                for number, part in enumerate(parts, s * len(parts)):
                    if form.has_scales:
                        found = [
                            f + p * scales[i // 2][number] for i, (f, p) in enumerate(zip(found, part, strict=True))
                        ]
                    else:
                        found = part
            lows = self._of_minimums(mins, columns) if form.has_min else nothing
            x_ds = [c.load(F32, column + acts.UNIT_D_256) for column in self._mine(columns)]
            for i, total in enumerate(totals):
                row, column = divmod(i, 2)
                own = Block256(ds[row], dmins[row], [])
                a = scaled256(own, of_thread(self._code, found[i]), of_thread(self._code, lows[i]), 0)
                total.value = c.fma(register_of(a), x_ds[column], total.value)

        return add

    def _of_minimums(self, mins: Sequence[Register], columns: Register) -> list[Register]:
        """The sums of minimums times the sums of sub-blocks, as seven bits and what is above them."""
        c = self._c
        first = acts.UNIT_SUMS_OF_16 if self.form.part == 16 else acts.UNIT_SUMS_OF_32
        at = columns + (self._lane >> 2) * UNIT_BYTES + (self._lane & 3) * 8 + first
        pairs = c.load_words(at, 2)
        low = c.permute(pairs[0] & 0x007F007F, pairs[1] & 0x007F007F, _EVEN_BYTES)
        high = c.permute(pairs[0] >> 7, pairs[1] >> 7, _EVEN_BYTES)
        above = c.mma(mins, [high], [c.i32(0)] * 4)
        return c.mma(mins, [low], [v << 7 for v in above])
