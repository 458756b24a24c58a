"""Blocks of weights as threads read them: each thread its own block, with the formats' own `unpack`.

The lanes of a vector are threads, so `unpack` leaves in each thread the weights and scales of the block at the thread's
address. Nothing is transposed or shuffled.
"""

from __future__ import annotations

from llamado.devices.cuda.lanes import GROUP, GroupLowering, LaneCode
from llamado.devices.cuda.simt import Register, SimtCode
from llamado.devices.kernels.formats.panel import Indices, Panel
from llamado.devices.simd import I8, I32, I64, I32x8, Type, Value

WIDEST = 16
"""Bytes of the widest load, and of an asynchronous copy."""

THREADS = GroupLowering("threads", columns=4, full_u8=False, signed=True)
"""Weights for products of signed bytes: those of a zero point are at most 127, all others are signed."""

_NEIGHBORS = (0x3210, 0x4321, 0x5432, 0x6543)
"""Selectors of `permute` for a word that begins 0 … 3 bytes after the first of two words."""


def thread_code(simt: SimtCode) -> LaneCode:
    """Return the SIMD language for threads that work alone. It has no scratch memory."""
    return LaneCode(simt, THREADS, simt.i64(0), simt.i64(0))


def of_thread(c: LaneCode, register: Register) -> Value:
    """A register of each thread as a vector."""
    return c.value(Type(register.type.elem, GROUP), [register])


def register_of(value: Value) -> Register:
    """Each thread's register of a vector with one."""
    (register,) = value.ir
    assert isinstance(register, Register)
    return register


class ThreadWords:
    """Reads bytes after an address of each thread, in shared or global memory.

    `align`: a power of two that divides the addresses. Loads are as wide as it allows. What was loaded is kept, so use
    it in one straight piece of code. If `align` is less than 4, a word may load up to three bytes after its own.
    """

    def __init__(self, simt: SimtCode, at: Register, align: int) -> None:
        self._simt, self._at, self._align = simt, at, align
        self._cells: dict[tuple[int, int], Register] = {}
        self._skews: dict[int, tuple[Register, Register]] = {}

    def word(self, offset: int) -> Register:
        """The four bytes at `offset`."""
        number, inside = divmod(offset, 4)
        if self._align >= 4:
            if not inside:
                return self._cell(number)
            return self._simt.permute(self._cell(number), self._cell(number + 1), _NEIGHBORS[inside])
        if inside not in self._skews:
            at = self._at + inside if inside else self._at
            self._skews[inside] = at & -4, (at & 3).to(I32) << 3
        base, bits = self._skews[inside]
        low, high = (self._loaded(inside, base, number + k) for k in range(2))
        return self._simt.funnel(low, high, bits)

    def small(self, type_: Type, offset: int) -> Register:
        """The byte or half (I8 or I16) at `offset`."""
        if self._align < 4:
            if self._align >= type_.bytes:
                return self._simt.load(type_, self._at + offset)
            return self.word(offset).to(type_)
        number, inside = divmod(offset, 4)
        if inside + type_.bytes > 4:
            return self.word(offset).to(type_)
        return (self._cell(number) >> (8 * inside) if inside else self._cell(number)).to(type_)

    def _loaded(self, skew: int, base: Register, number: int) -> Register:
        if (skew, number) not in self._cells:
            self._cells[skew, number] = self._simt.load(I32, base + 4 * number)
        return self._cells[skew, number]

    def _cell(self, number: int) -> Register:
        """The aligned word of this number."""
        wide = min(self._align, WIDEST) // 4
        if wide == 1:
            return self._loaded(0, self._at, number)
        first = number // wide * wide
        if (0, first) not in self._cells:
            for k, word in enumerate(self._simt.load_words(self._at + 4 * first, wide)):
                self._cells[0, first + k] = word
        return self._cells[0, number]


class ThreadPanel(Panel):
    """The block `offset` bytes after each thread's address."""

    def __init__(self, c: LaneCode, words: ThreadWords, offset: int) -> None:
        self._c: LaneCode = c
        self._words, self._offset, self.n = words, offset, GROUP

    def cells(self, offset: int, n: int) -> list[Value]:
        at = self._offset + offset
        return [self._c.value(I32x8, [self._words.word(at + 4 * k)]) for k in range(n)]

    def gather(self, elem: Type, offset: int) -> Value:
        at = self._offset + offset
        return of_thread(self._c, self._words.word(at) if elem == I32 else self._words.small(elem, at))

    def indices_at(self, offset: int) -> Indices:
        return [self.gather(I8, offset).zext(I32x8)]

    def indices(self, lanes: Value) -> Indices:
        return [lanes]

    def entries4(self, table: Value, indices: Indices) -> Value:
        simt, (index,) = self._c.simt, indices
        return self._group(simt.load(I32, register_of(table) + register_of(index).to(I64) * 4))

    def entries8(self, table: Value, indices: Indices) -> list[Value]:
        simt, (index,) = self._c.simt, indices
        two = simt.load_words(register_of(table) + register_of(index).to(I64) * 8, 2)
        return [self._group(word) for word in two]

    def _group(self, word: Register) -> Value:
        return self._c.value(Type("i8", 4 * GROUP), [word])
