"""Products of F32, F16 and BF16 weights with f32 activations.

As in `devices/kernels/floats.py`, each output has eight partial sums (k mod 8), added in one fixed tree at the end. The
threads of a group of eight have one partial sum each, of some rows and columns. Asynchronous copies bring chunks of K
of the rows and columns of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from llamado.devices.cuda.kernel import kernel
from llamado.devices.cuda.lanes import GROUP
from llamado.devices.cuda.panel import WIDEST
from llamado.devices.cuda.simt import Register, SimtCode
from llamado.devices.kernels.elements import SCALAR
from llamado.devices.simd import F32, I16, I32, I64
from llamado.gguf.types import TensorType


@dataclass(frozen=True)
class FloatTile:
    """Rows and columns of a group of threads; groups of a block in both directions; elements of a chunk of K, a
    multiple of eight; chunks in shared memory.
    """

    weights: str
    rows: int
    columns: int
    row_groups: int
    column_groups: int
    chunk: int
    stages: int

    @property
    def type(self) -> TensorType:
        return TensorType[self.weights]

    @property
    def size(self) -> int:
        """Bytes of a weight."""
        return self.type.block_bytes

    @property
    def threads(self) -> int:
        return GROUP * self.row_groups * self.column_groups

    @property
    def block_rows(self) -> int:
        return self.rows * self.row_groups

    @property
    def block_columns(self) -> int:
        return self.columns * self.column_groups

    def pitch(self, size: int) -> int:
        """Bytes from one row of a chunk to the next, for elements of this size: neighbors are in different banks."""
        return (self.chunk + GROUP) * size

    @property
    def x_at(self) -> int:
        """Offset of the columns in a stage."""
        return self.block_rows * self.pitch(self.size)

    @property
    def stage_bytes(self) -> int:
        return self.x_at + self.block_columns * self.pitch(F32.bytes)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes


@kernel(
    *("w", "w1", "w2", "w3", "x", "x1", "x2", "x3", "y", "y1", "y2", "y3"),
    *("n", "n_rows", "n_columns", "n2", "n3", "r2", "r3"),
)
def matmul_float(c: SimtCode, a: SimpleNamespace, *, tile: FloatTile) -> None:
    """y[i3, i2, column, row] = w[i3/r3, i2/r2, row] · x[i3, i2, column]; rows and columns begin at multiples of 16
    bytes. Blocks: rows (x); columns, i2 and i3 (y).
    """
    thread, block = c.thread(), c.block("y").to(I64)
    lane, group = thread & (GROUP - 1), thread // GROUP
    across = (a.n_columns + (tile.block_columns - 1)) // tile.block_columns
    matrix = block // across
    i2, i3 = matrix % a.n2, matrix // a.n2
    w = a.w + i2 // a.r2 * a.w2 + i3 // a.r3 * a.w3
    x, y = a.x + i2 * a.x2 + i3 * a.x3, a.y + i2 * a.y2 + i3 * a.y3
    first_row, first_column = c.block().to(I64) * tile.block_rows, block % across * tile.block_columns

    def row_at(number: Register) -> Register:
        at: Register = w + c.min(first_row + number.to(I64), a.n_rows - 1) * a.w1
        return at

    def column_at(number: Register) -> Register:
        at: Register = x + c.min(first_column + number.to(I64), a.n_columns - 1) * a.x1
        return at

    def fetch(chunk: Register) -> None:
        stage = c.shared() + chunk % tile.stages * tile.stage_bytes
        for to, count, address, size in (
            (stage, tile.block_rows, row_at, tile.size),
            (stage + tile.x_at, tile.block_columns, column_at, F32.bytes),
        ):
            pieces = tile.chunk * size // WIDEST
            offset = chunk.to(I64) * (tile.chunk * size)
            with c.range(thread, count * pieces, tile.threads) as piece:
                number, part = piece // pieces, piece % pieces
                at = offset + part.to(I64) * WIDEST
                with c.when(at < a.n * size):
                    c.copy16(to + number * tile.pitch(size) + part * WIDEST, address(number) + at)

    row_numbers = [group % tile.row_groups + r * tile.row_groups for r in range(tile.rows)]
    column_numbers = [group // tile.row_groups + j * tile.column_groups for j in range(tile.columns)]
    sums = [[c.var(c.f32(0.0)) for _ in column_numbers] for _ in row_numbers]
    steps, n_steps = tile.chunk // GROUP, (a.n // GROUP).to(I32)
    n_chunks = (n_steps + (steps - 1)) // steps
    for early in range(tile.stages - 1):
        with c.when(n_chunks > early):
            fetch(c.i32(early))
        c.commit()
    with c.range(c.i32(0), n_chunks) as chunk:
        c.wait(tile.stages - 2)
        c.barrier()
        ahead = chunk + (tile.stages - 1)
        with c.when(ahead < n_chunks):
            fetch(ahead)
        c.commit()
        stage, left = c.shared() + chunk % tile.stages * tile.stage_bytes, n_steps - chunk * steps
        rows = [stage + number * tile.pitch(tile.size) + lane * tile.size for number in row_numbers]
        columns = [stage + tile.x_at + number * tile.pitch(F32.bytes) + lane * F32.bytes for number in column_numbers]

        def step(
            number: Register | int, rows: Sequence[Register] = rows, columns: Sequence[Register] = columns
        ) -> None:
            xs = [c.load(F32, at + number * (GROUP * F32.bytes)) for at in columns]
            for totals, at in zip(sums, rows, strict=True):
                weight = _load(c, tile.type, at + number * (GROUP * tile.size))
                for total, value in zip(totals, xs, strict=True):
                    total.value = c.fma(weight, value, total.value)

        with c.when(left >= steps):
            for k in range(steps):
                step(k)
        with c.when(left < steps), c.range(c.i32(0), left) as late:
            step(late)
    tails = [[c.var(c.f32(0.0)) for _ in column_numbers] for _ in row_numbers]
    with c.range(a.n // GROUP * GROUP, a.n) as at:
        xs = [c.load(F32, column_at(number) + at * F32.bytes) for number in column_numbers]
        for totals, number in zip(tails, row_numbers, strict=True):
            weight = _load(c, tile.type, row_at(number) + at * tile.size)
            for total, value in zip(totals, xs, strict=True):
                total.value = c.fma(weight, value, total.value)
    for r, row in enumerate(row_numbers):
        for j, column in enumerate(column_numbers):
            whole = sums[r][j].value
            for distance in (4, 2, 1):
                whole = whole + c.shuffle_xor(whole, distance)
            at_row, at_column = first_row + row.to(I64), first_column + column.to(I64)
            mine = lane.equals((r * tile.columns + j) % GROUP)
            with c.when(mine & (at_row < a.n_rows) & (at_column < a.n_columns)):
                c.store(y + at_column * a.y1 + at_row * F32.bytes, whole + tails[r][j].value)


def _load(c: SimtCode, type_: TensorType, at: Register) -> Register:
    """Load a weight as f32."""
    if type_ is TensorType.BF16:
        return (c.load(I16, at).zext(I32) << 16).bits(F32)
    return c.load(SCALAR[type_], at).to(F32)
