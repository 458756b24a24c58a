"""Products of quantized weights with few columns, for which reading the weights takes longest.

A warp has some rows and takes a chunk of each at a time: its lanes compute the terms of one unit of 256 weights each
(`terms.py`), out of shared memory, where asynchronous copies bring the weights of the next chunk meanwhile. Then the
running sum of each row goes from lane to lane, so that the terms are added in the order of K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from llamado.devices.cuda.kernel import kernel
from llamado.devices.cuda.kernels.terms import Form, Term, unit_bytes, unit_terms
from llamado.devices.cuda.panel import WIDEST, ThreadWords, thread_code
from llamado.devices.cuda.simt import WARP, Register, SimtCode
from llamado.devices.kernels.activations import UNIT_BYTES
from llamado.devices.kernels.formats import in_blocks
from llamado.devices.kernels.formats.format import Blocks32
from llamado.devices.simd import I32, I64
from llamado.gguf.types import TensorType

_BANKS = 8
"""Pieces of 16 bytes in all banks of shared memory."""


@dataclass(frozen=True)
class FewTile:
    """Rows of a warp, a divisor of 32; warps of a block; stages of shared memory: 1 if all units are one chunk, else 2.

    `align`: a power of two, at most 16, that divides the address of each unit of weights. `ragged`: True if rows do not
    end with a whole unit. `chained`: True if no operation of the graph writes the weights, so that the kernel may fetch
    them while the one before it still computes the columns.
    """

    weights: str
    columns: int
    rows: int
    warps: int
    stages: int
    align: int
    ragged: bool
    chained: bool = False

    @property
    def form(self) -> Form:
        return in_blocks(TensorType[self.weights])

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def across(self) -> int:
        """Units of a row that a warp takes at a time."""
        return WARP // self.rows

    @property
    def step(self) -> int:
        """Bytes of a row that a warp takes at a time."""
        return self.across * unit_bytes(self.form)

    @property
    def pieces(self) -> int:
        """Pieces of 16 bytes, at addresses that are multiples of 16, which cover a step."""
        return -(-(self.step + WIDEST - self.align) // WIDEST)

    @property
    def area(self) -> int:
        """Bytes of shared memory for a step of one row: such that rows are in different banks."""
        pieces = self.pieces + (self.align < WIDEST)  # words that are not aligned are read with the next one
        return WIDEST * (pieces + (self.across - pieces) % _BANKS)

    @property
    def x_bytes(self) -> int:
        """Bytes of shared memory for a step of all columns."""
        return self.columns * self.across * UNIT_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.x_bytes + self.warps * self.rows * self.area

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes


def alignment(*numbers: int) -> int:
    """Return the greatest power of two, at most 16, that divides all numbers."""
    together = WIDEST
    for number in numbers:
        together |= number
    return together & -together


@kernel("w", "row_bytes", "n_rows", "n_units", "n_parts", "x", "x_step", "y", "y_step")
def matmul_few(c: SimtCode, a: SimpleNamespace, *, tile: FewTile) -> None:
    """y = W·x for `tile.columns` columns. Steps: bytes from one column to the next. `n_parts`: times 32 weights of a
    row, for those that do not end with a whole unit.
    """
    xs = [a.x + a.x_step * j for j in range(tile.columns)]
    ys = [a.y + a.y_step * j for j in range(tile.columns)]
    FewRows(c, tile, a).multiply(a.w, xs, ys)


class FewRows:
    """The rows of one warp."""

    def __init__(self, c: SimtCode, tile: FewTile, a: SimpleNamespace) -> None:
        """`a` has the shape of the weights: row_bytes, n_rows, n_units, n_parts."""
        self._c, self._tile = c, tile
        self._row_bytes, self._n_rows = a.row_bytes, a.n_rows.to(I32)
        self._n_units, self._n_parts = a.n_units.to(I32), a.n_parts.to(I32)
        thread = c.thread()
        self._lane, warp = thread & (WARP - 1), thread >> 5
        self._first = (c.block() * tile.warps + warp) * tile.rows
        self._x_shared = c.shared()
        self._own = c.shared() + tile.x_bytes + warp * (tile.rows * tile.area)
        self._here, self._row = self._lane & (tile.across - 1), self._lane // tile.across

    def multiply(self, w: Register, xs: Sequence[Register], ys: Sequence[Register]) -> None:
        """Multiply a matrix at `w` with the columns at `xs`; results go to the columns at `ys`."""
        c, tile = self._c, self._tile
        sums = [c.var(c.f32(0.0)) for _ in xs]
        n_chunks = (self._n_units + (tile.across - 1)) // tile.across
        start = w + self._row_number(self._row).to(I64) * self._row_bytes

        def step(chunk: Register, stage: Register) -> None:
            terms = self._terms(start, chunk, stage)
            found = self._added(chunk, [total.value for total in sums], terms)
            for total, more in zip(sums, found, strict=True):
                total.value = more

        nothing = c.i32(0)
        if tile.chained:
            c.let_next_begin()
        self._fetch_weights(w, nothing, nothing)
        if tile.chained:
            c.wait_for_last()
        self._fetch_columns(xs, nothing, nothing)
        c.commit()
        if tile.stages == 1:
            c.wait(0)
            c.barrier()
            step(nothing, nothing)
        else:
            with c.range(nothing, n_chunks) as chunk:
                with c.when(chunk + 1 < n_chunks):
                    self._fetch_weights(w, chunk + 1, (chunk + 1) & 1)
                    self._fetch_columns(xs, chunk + 1, (chunk + 1) & 1)
                c.commit()
                c.wait(1)
                c.barrier()
                step(chunk, chunk & 1)
                c.barrier()
        row = self._first + self._row
        with c.when((row < self._n_rows) & self._here.equals(0)):
            for y, total in zip(ys, sums, strict=True):
                c.store(y + row.to(I64) * 4, total.value)

    def _row_number(self, number: Register) -> Register:
        """The row of this number in the warp; the last one if there is none."""
        return self._c.min(self._first + number, self._n_rows - 1)

    def _fetch_weights(self, w: Register, chunk: Register, stage: Register) -> None:
        """Begin to copy a chunk of the warp's rows."""
        c, tile = self._c, self._tile
        to, offset, n = self._own + stage * tile.stage_bytes, chunk.to(I64) * tile.step, tile.rows * tile.pieces
        for first in range(0, n, WARP):
            piece = self._lane + first
            number, part = piece // tile.pieces, piece % tile.pieces
            row = w + self._row_number(number).to(I64) * self._row_bytes
            source = ((row + offset) & -WIDEST) + part.to(I64) * WIDEST
            inside = source < row + self._row_bytes
            with c.when(inside if first + WARP <= n else inside & (piece < n)):
                c.copy16(to + number * tile.area + part * WIDEST, source)

    def _fetch_columns(self, xs: Sequence[Register], chunk: Register, stage: Register) -> None:
        """Begin to copy a chunk of the block's columns."""
        c, tile = self._c, self._tile
        x_to, pieces = self._x_shared + stage * tile.stage_bytes, UNIT_BYTES // WIDEST
        x_offset = chunk.to(I64) * (tile.across * UNIT_BYTES)
        left = (self._n_units - chunk * tile.across) * pieces
        for j, x in enumerate(xs):
            for first in range(0, tile.across * pieces, WARP * tile.warps):
                piece = c.thread() + first
                with c.when((piece < left) & (piece < tile.across * pieces)):
                    to_x = x_to + j * tile.across * UNIT_BYTES
                    c.copy16(to_x + piece * WIDEST, x + x_offset + piece.to(I64) * WIDEST)

    def _terms(self, start: Register, chunk: Register, stage: Register) -> list[list[Term]]:
        """The terms of this thread's unit. `start`: address of the thread's row."""
        c, tile = self._c, self._tile
        at = self._own + stage * tile.stage_bytes + self._row * tile.area + self._here * unit_bytes(tile.form)
        if tile.align < WIDEST:
            at = at + ((start + chunk.to(I64) * tile.step) & (WIDEST - 1)).to(I32)
        x = self._x_shared + stage * tile.stage_bytes + self._here * UNIT_BYTES
        columns = [x + j * tile.across * UNIT_BYTES for j in range(tile.columns)]
        return unit_terms(thread_code(c), tile.form, ThreadWords(c, at, tile.align), columns)

    def _added(self, chunk: Register, totals: Sequence[Register], terms: Sequence[Sequence[Term]]) -> list[Register]:
        """The sums of all columns after a chunk, the same in all lanes of a row."""
        c, tile = self._c, self._tile
        totals, units = list(totals), chunk * tile.across
        mine = (units + self._here) * 8
        last = self._lane - self._here
        ragged = tile.ragged and isinstance(tile.form, Blocks32)
        for i in range(tile.across):
            for j, more in enumerate(terms):
                total = totals[j]
                for a, b, part in more:
                    added = c.fma(a, b, total)
                    total = c.select(mine + part < self._n_parts, added, total) if ragged else added
                if tile.across > 1:
                    total = c.shuffle(total, last + i)
                totals[j] = c.select(units + i < self._n_units, total, totals[j])
        return totals
