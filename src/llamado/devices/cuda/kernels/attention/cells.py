"""Keys and values of a cache, and their copies in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llamado.devices.cuda.kernels.functions import Functions
from llamado.devices.cuda.simt import Register, SimtCode
from llamado.devices.simd import F16, F32, I16, I32, I64
from llamado.gguf.types import TensorType

PLAIN = (TensorType.F16, TensorType.BF16, TensorType.F32)

_LOADS = 32
"""Most loads of a thread that are under way together."""


class Span(NamedTuple):
    """Elements `first` to `first + n` of `rows` cells, of which the cells have `head`. Row i of the copy is that of the
    address `cell(i)`.
    """

    cell: Callable[[Register], Register]
    rows: int
    first: Register
    n: int
    head: int

    def inside(self, c: SimtCode, element: Register, n: int) -> Register:
        """The number of an element in its cell, if a cell ends before the span: at most the one `n` before the end."""
        number = self.first + element
        return number if self.head % self.n == 0 else c.min(number, self.head - n)


class CellFormat(NamedTuple):
    """The form of cells of a type in shared memory. `direct`: cells are copied as they are, which needs plain numbers
    at addresses of whole 16 bytes. Others are converted to f32.
    """

    type: TensorType
    direct: bool

    @property
    def element(self) -> TensorType:
        """The type of the copies' elements."""
        return self.type if self.direct else TensorType.F32

    @property
    def bytes(self) -> int:
        """Bytes of an element of the copies."""
        return self.element.block_bytes

    def fetch(
        self, c: SimtCode, functions: Functions, to: Register, stride: int, span: Span, thread: Register, threads: int
    ) -> None:
        """Begin to copy a span to shared memory, rows `stride` bytes apart, with `threads` threads, this one being
        `thread`.
        """
        if self.direct:
            self._copy(c, to, stride, span, thread, threads)
        else:
            self._convert(c, functions, to, stride, span, thread, threads)

    def _copy(self, c: SimtCode, to: Register, stride: int, span: Span, thread: Register, threads: int) -> None:
        of_piece = 16 // self.bytes
        pieces = span.n // of_piece
        for number in range(0, span.rows * pieces, threads):
            piece = thread + number
            row, part = piece // pieces, piece % pieces
            element = span.inside(c, part * of_piece, of_piece)
            source, target = span.cell(row) + element.to(I64) * self.bytes, to + row * stride + part * 16
            if number + threads > span.rows * pieces:
                with c.when(piece < span.rows * pieces):
                    c.copy16(target, source)
            else:
                c.copy16(target, source)

    def _convert(
        self, c: SimtCode, functions: Functions, to: Register, stride: int, span: Span, thread: Register, threads: int
    ) -> None:
        lane, group, groups = thread & 7, thread // 8, threads // 8
        of_group = span.rows // groups
        at_once = max(n for n in range(1, of_group + 1) if of_group % n == 0 and n * span.n <= max(8 * _LOADS, span.n))
        with c.range(c.i32(0), span.rows, groups * at_once) as first:
            rows = [first + group + groups * i for i in range(at_once)]
            places = [(row, span.cell(row), c.i32(d)) for row in rows for d in range(0, span.n, 8)]
            values = [functions.load_eight(self.type, cell, span.inside(c, d, 8).to(I64)) for _, cell, d in places]
            for (row, _, d), value in zip(places, values, strict=True):
                c.store(to + row * stride + (lane + d) * 4, value)

    def load(self, c: SimtCode, at: Register) -> Register:
        """The element at a shared address, as f32."""
        if self.element is TensorType.F32:
            return c.load(F32, at)
        if self.element is TensorType.F16:
            return c.load(F16, at).to(F32)
        return (c.load(I16, at).zext(I32) << 16).bits(F32)

    def load_eight(self, c: SimtCode, at: Register) -> list[Register]:
        """Eight elements from an address of whole 16 bytes on, as f32."""
        words = [word for i in range(0, 8 * self.bytes, 16) for word in c.load_words(at + i, 4)]
        return [value for word in words for value in self.of_word(c, word)]

    def of_word(self, c: SimtCode, word: Register) -> list[Register]:
        """The elements in a word, as f32."""
        if self.element is TensorType.F32:
            return [word.bits(F32)]
        if self.element is TensorType.F16:
            return [c.half_of(word, high=high) for high in (False, True)]
        return [(word << 16).bits(F32), (word & -0x10000).bits(F32)]
