"""Rows of weights as `unpack` reads them: a block of each row at once, one lane for each row."""

from __future__ import annotations

from collections.abc import Sequence

from llamado.devices.simd import I8, I16, I32, I64, Code, I32x4, I32x8, Type, Value

Indices = Sequence[Value]
"""A number for each row of a panel, to look up in a table."""


class Panel:
    """A block of each of `n` rows of weights (8 or 16). Lane r of every vector belongs to row r.

    Cells are loaded row by row and transposed. A device whose lanes are threads overrides the methods so that each
    thread reads its own row.
    """

    def __init__(self, c: Code, rows: Sequence[Value], block_bytes: int) -> None:
        """`rows`: address of each row's block of `block_bytes` bytes, which decide the alignment of its parts."""
        self._c, self._rows, self.n = c, rows, len(rows)
        self._block_bytes = block_bytes

    def aligned(self, offset: int) -> int:
        """The alignment of byte `offset` of any block."""
        either = self._block_bytes | offset
        return either & -either

    def cells(self, offset: int, n: int) -> list[Value]:
        """The `n` (4 or 8) 4-byte cells from `offset` on of each row, as I32 vectors."""
        if n == 4:
            return self._c.transpose8x4([self._c.load(I32x4, row + offset, self.aligned(offset)) for row in self._rows])
        return self._c.transpose8([self._c.load(I32x8, row + offset, self.aligned(offset)) for row in self._rows])

    def gather(self, elem: Type, offset: int) -> Value:
        """The element at `offset` of each row."""
        return self._c.gather(elem, [row + offset for row in self._rows], self.aligned(offset))

    def halves(self, offset: int) -> Value:
        """The f16 at `offset` of each row as f32."""
        return self.gather(I16, offset).as_lanes("f16").cast("f32")

    # --- tables ---------------------------------------------------------------------------------------------------
    def indices_at(self, offset: int) -> Indices:
        """The byte at `offset` of each row as an index."""
        return [self._c.load(I8, row + offset).zext(I64) for row in self._rows]

    def indices(self, lanes: Value) -> Indices:
        """The lanes of an I32 vector as indices, extracted row by row (gather instructions are slower)."""
        return [lanes.lane(r).zext(I64) for r in range(self.n)]

    def entries4(self, table: Value, indices: Indices) -> Value:
        """The four bytes of each row's entry of a table, as an I8 vector."""
        return self._c.gather(I32, [table + index * 4 for index in indices]).as_lanes("i8")

    def entries8(self, table: Value, indices: Indices) -> list[Value]:
        """The eight bytes of each row's entry of a table: the first four, and the last four."""
        addresses = [table + index * 8 for index in indices]
        n, fours = self.n, range(0, self.n, 4)
        even, odd = (
            self._c.gather(I64, [addresses[r + k] for r in fours for k in two]).as_lanes("i32")
            for two in ((0, 1), (2, 3))
        )
        lanes = [lane for r in fours for lane in (r, r + 2, n + r, n + r + 2)]
        return [self._c.shuffle(even, odd, [lane + half for lane in lanes]).as_lanes("i8") for half in range(2)]
