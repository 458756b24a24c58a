"""The SIMT language: Python that describes what every thread of a GPU kernel does.

A kernel is a Python function that runs once, when its code is made. Its values (`Register`) stand for one register of
each thread: arithmetic appends instructions, an ordinary Python loop unrolls, `range` makes a loop and `when` a branch.
Threads form warps of `WARP`, warps form blocks, blocks form the grid of a launch. The threads of a block share memory
and wait for each other at barriers; those of a warp exchange registers by shuffles.

`lowerings` implement `SimtCode`: as PTX for NVIDIA's driver, and in numpy for machines without a GPU. Nothing else
depends on a manufacturer. No float operation is contracted or reordered: `a * b + c` rounds twice, `fma` once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Protocol

from llamado.devices.simd import F16, F32, I16, I32, I64, Type

I1 = Type("i1")
S32 = Type("s32")
"""An address in the shared memory of a block. Addresses in global memory are I64."""

WARP = 32

Number = int | float


class Register:
    """One register of each thread. Integers are signed unless a name says otherwise."""

    __slots__ = ("code", "ref", "type")

    def __init__(self, code: SimtCode, type_: Type, ref: Any) -> None:
        self.code, self.type, self.ref = code, type_, ref

    def _binary(self, name: str, other: Register | Number) -> Register:
        if not isinstance(other, Register):
            other = self.code.const(self.type, other)
        elif other.type != self.type and (self.type, other.type) != (S32, I32):
            raise TypeError(f"{name} of {self.type.elem} and {other.type.elem}")
        return self.code.binary(f"f{name}" if self.type.is_float else name, self, other)

    def __add__(self, other: Register | Number) -> Register:
        return self._binary("add", other)

    def __sub__(self, other: Register | Number) -> Register:
        return self._binary("sub", other)

    def __mul__(self, other: Register | Number) -> Register:
        return self._binary("mul", other)

    def __truediv__(self, other: Register | Number) -> Register:
        return self._binary("div", other)

    def __floordiv__(self, other: Register | Number) -> Register:
        """Unsigned division of integers."""
        return self._binary("udiv", other)

    def __mod__(self, other: Register | Number) -> Register:
        """Unsigned remainder of integers."""
        return self._binary("urem", other)

    def __and__(self, other: Register | Number) -> Register:
        return self._binary("and", other)

    def __or__(self, other: Register | Number) -> Register:
        return self._binary("or", other)

    def __xor__(self, other: Register | Number) -> Register:
        return self._binary("xor", other)

    def __lshift__(self, other: Register | Number) -> Register:
        return self._binary("shl", other)

    def __rshift__(self, other: Register | Number) -> Register:
        """Logical shift right; `sar` is the arithmetic one."""
        return self._binary("lshr", other)

    def sar(self, other: Register | Number) -> Register:
        """Arithmetic shift right."""
        return self._binary("ashr", other)

    def __neg__(self) -> Register:
        return self.code.negate(self)

    def __radd__(self, other: Number) -> Register:
        return self + other

    def __rmul__(self, other: Number) -> Register:
        return self * other

    def __rsub__(self, other: Number) -> Register:
        return self.code.const(self.type, other) - self

    def _compare(self, op: str, other: Register | Number) -> Register:
        return self.code.compare(op, self, other if isinstance(other, Register) else self.code.const(self.type, other))

    def __lt__(self, other: Register | Number) -> Register:
        return self._compare("<", other)

    def __le__(self, other: Register | Number) -> Register:
        return self._compare("<=", other)

    def __gt__(self, other: Register | Number) -> Register:
        return self._compare(">", other)

    def __ge__(self, other: Register | Number) -> Register:
        return self._compare(">=", other)

    def equals(self, other: Register | Number) -> Register:
        """Equality as i1 (Python's `==` compares objects)."""
        return self._compare("==", other)

    def differs(self, other: Register | Number) -> Register:
        """Inequality as i1; true for NaN only if the other is none (an ordered comparison)."""
        return self._compare("!=", other)

    def to(self, type_: Type) -> Register:
        """Convert: signed integer ↔ integer, integer ↔ float, float ↔ float (floats truncate to integers)."""
        return self if type_ == self.type else self.code.convert(self, type_)

    def zext(self, type_: Type) -> Register:
        """Zero-extend an integer."""
        return self if type_ == self.type else self.code.convert(self, type_, unsigned=True)

    def bits(self, type_: Type) -> Register:
        """Reinterpret the bits as another type of the same size."""
        return self if type_ == self.type else self.code.bitcast(self, type_)


class Variable(Protocol):
    """A register that loops and branches may change."""

    @property
    def type(self) -> Type: ...

    @property
    def value(self) -> Register: ...

    @value.setter
    def value(self, new: Register) -> None: ...


Trace = Callable[..., None]
"""`trace(code, arguments, **parameters)`: emits a kernel; `arguments` has one I64 register for each field."""


class SimtCode(ABC):
    """A kernel under construction: what every thread of a launch does."""

    # --- values ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def const(self, type_: Type, number: Number) -> Register:
        """A constant, the same in all threads."""

    @abstractmethod
    def binary(self, name: str, a: Register, b: Register) -> Register:
        """`add`, `sub`, `mul`, `udiv`, `urem`, `and`, `or`, `xor`, `shl`, `lshr`, `ashr` of integers, `fadd`, `fsub`,
        `fmul`, `fdiv` of floats, rounded to nearest even.
        """

    @abstractmethod
    def negate(self, a: Register) -> Register:
        """−a."""

    @abstractmethod
    def compare(self, op: str, a: Register, b: Register) -> Register:
        """Compare signed integers, or floats (false if one of them is NaN)."""

    @abstractmethod
    def select(self, condition: Register, yes: Register, no: Register) -> Register:
        """`yes` where the condition holds, else `no`."""

    @abstractmethod
    def convert(self, v: Register, type_: Type, *, unsigned: bool = False) -> Register:
        """Convert to another type; see `Register.to`. An i1 becomes 0 or 1 if `unsigned`, else 0 or −1."""

    @abstractmethod
    def bitcast(self, v: Register, type_: Type) -> Register:
        """Reinterpret the bits as another type of the same size."""

    @abstractmethod
    def fma(self, a: Register, b: Register, c: Register) -> Register:
        """a·b + c with one rounding."""

    @abstractmethod
    def function(self, name: str, a: Register) -> Register:
        """`sqrt`, `abs`, `rint` (ties to even) or `floor` of a float; `ctpop`, `cttz` or `ctlz` of an integer (its
        width for zero).
        """

    @abstractmethod
    def permute(self, a: Register, b: Register, selector: Register | int) -> Register:
        """The word of four bytes of a (0 … 3) and b (4 … 7) that the last four hexadecimal digits of `selector` (each
        less than 8) number, the last digit the lowest byte.
        """

    @abstractmethod
    def funnel(self, low: Register, high: Register, bits: Register) -> Register:
        """The low word of the 64 bits of two words, shifted right by `bits` (0 … 31)."""

    @abstractmethod
    def dot4(self, a: Register, b: Register, total: Register, *, signed: bool) -> Register:
        """total + the dot product of four bytes of a, signed or unsigned, and four signed bytes of b (i32 words)."""

    # --- memory ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def load(self, type_: Type, address: Register, align: int = 0) -> Register:
        """Load from an address aligned to `align` bytes (default: the type's size)."""

    @abstractmethod
    def load_words(self, address: Register, n: int) -> list[Register]:
        """Load n (2 or 4) i32 words from an address aligned to all of them."""

    @abstractmethod
    def store(self, address: Register, value: Register, align: int = 0) -> None:
        """Store at an address aligned to `align` bytes (default: the type's size)."""

    @abstractmethod
    def store_words(self, address: Register, words: Sequence[Register]) -> None:
        """Store 2 or 4 i32 words at an address aligned to all of them."""

    @abstractmethod
    def atomic_add(self, address: Register, amount: Register) -> Register:
        """Add to the integer at a global address; return the value before."""

    @abstractmethod
    def shared(self) -> Register:
        """The beginning of the block's shared memory (S32)."""

    @abstractmethod
    def table(self, name: str, numbers: bytes) -> Register:
        """The global address of constant bytes, aligned to 64."""

    @abstractmethod
    def copy16(self, to: Register, source: Register) -> None:
        """Begin to copy 16 bytes from a global to a shared address, both aligned to 16."""

    @abstractmethod
    def prefetch(self, address: Register) -> None:
        """Load the cache line at a global address into the cache of all processors."""

    @abstractmethod
    def commit(self) -> None:
        """End a group of copies of this thread."""

    @abstractmethod
    def wait(self, left: int) -> None:
        """Wait until at most the last `left` groups of this thread's copies are unfinished."""

    # --- threads -----------------------------------------------------------------------------------------------------
    @abstractmethod
    def thread(self) -> Register:
        """The thread's number in its block (I32)."""

    @abstractmethod
    def threads(self) -> Register:
        """Threads of a block (I32)."""

    @abstractmethod
    def block(self, axis: str = "x") -> Register:
        """The block's number (I32) on an axis of the grid."""

    @abstractmethod
    def blocks(self, axis: str = "x") -> Register:
        """Blocks of the grid on an axis (I32)."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all threads of the block, and see what they wrote."""

    @abstractmethod
    def sync(self, width: int = WARP) -> None:
        """Wait for the `width` neighboring threads of this thread, and see what they wrote."""

    @abstractmethod
    def shuffle(self, v: Register, lane: Register | int, width: int = WARP) -> Register:
        """The value that thread `lane` of these `width` neighbors has; all of them take part."""

    @abstractmethod
    def shuffle_xor(self, v: Register, mask: int, width: int = WARP) -> Register:
        """The value that the neighbor has whose number differs by the bits of `mask`."""

    @abstractmethod
    def let_next_begin(self) -> None:
        """Allow the next kernel of a chained launch to begin."""

    @abstractmethod
    def wait_for_last(self) -> None:
        """Wait until the kernel before this one in a chained launch is done, and see what it wrote."""

    @abstractmethod
    def mma(self, a: Sequence[Register], b: Sequence[Register], c: Sequence[Register]) -> list[Register]:
        """c (16 × 8, i32) + a (16 × 32) · b (32 × 8) of signed bytes in a warp; with half as many words 16 × 16 and
        16 × 8. Fragments as in PTX ISA, "Matrix Fragments for mma.m16n8k32".
        """

    @abstractmethod
    def load_matrices(self, address: Register) -> list[Register]:
        """Load four matrices of eight rows of 16 bytes from shared memory: thread l of a warp gives the address of row
        l % 8 of matrix l // 8, and gets word l % 4 of row l // 4 of each.
        """

    # --- control -----------------------------------------------------------------------------------------------------
    @abstractmethod
    def var(self, initial: Register) -> Variable:
        """A variable."""

    @abstractmethod
    def range(
        self, start: Register | int, stop: Register | int, step: int | Register = 1
    ) -> AbstractContextManager[Register]:
        """A loop: `with code.range(0, n) as i:`."""

    @abstractmethod
    def loop(self) -> AbstractContextManager[Any]:
        """An endless loop; `leave` inside it ends it."""

    @abstractmethod
    def leave(self, loop: Any, condition: Register) -> None:
        """Leave the loop where the condition holds. Only directly in the loop's body, not in a branch of it."""

    @abstractmethod
    def when(self, condition: Register) -> AbstractContextManager[None]:
        """Run the body where the condition holds."""

    # --- composed of the above ---------------------------------------------------------------------------------------
    def i32(self, number: int) -> Register:
        return self.const(I32, number)

    def i64(self, number: int) -> Register:
        return self.const(I64, number)

    def f32(self, number: float) -> Register:
        return self.const(F32, number)

    def max(self, a: Register, b: Register | Number) -> Register:
        """The greater value; b if a is NaN."""
        other = b if isinstance(b, Register) else self.const(a.type, b)
        return self.select(a > other, a, other)

    def min(self, a: Register, b: Register | Number) -> Register:
        """The smaller value; b if a is NaN."""
        other = b if isinstance(b, Register) else self.const(a.type, b)
        return self.select(a < other, a, other)

    def half_of(self, word: Register, *, high: bool) -> Register:
        """The f16 in one half of a word, as f32."""
        return ((word >> 16) if high else word).to(I16).bits(F16).to(F32)


def arguments(fields: Sequence[str], registers: Iterator[Register] | Sequence[Register]) -> SimpleNamespace:
    """Return a kernel's arguments by name."""
    return SimpleNamespace(**dict(zip(fields, registers, strict=True)))
