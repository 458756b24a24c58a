"""Operations shared by the types with codebooks: tables of points, signs, scales.

The codebook is stored beside the kernel's code as bytes, ready for products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamado.devices.kernels.formats import bits
from llamado.devices.simd import Code, Value
from llamado.gguf.codebooks import codebook
from llamado.gguf.types import TensorType

_PARITY = [(bin(n).count("1") & 1) << 7 for n in range(16)]


def table(c: Code, type_: TensorType, held: Callable[[int], int]) -> Value:
    """Return the address of a type's codebook. `held` maps a level to its byte."""
    book = codebook(type_)
    return c.table(f"codebook.{type_.name}", bytes(held(level) & 0xFF for point in book.points for level in point))


def byte(cell: Value, k: int) -> Value:
    """Byte k of each lane."""
    return (cell >> 8 * k) & 0xFF


def above(cell: Value, bit: int, n: int) -> Value:
    """Move the `n` bits of each lane from `bit` on to the bits above a byte."""
    return (cell << 8 - bit if bit < 8 else cell >> bit - 8) & (((1 << n) - 1) << 8)


def signs_of_sevens(c: Code, packed: Value) -> Value:
    """Unpack four times seven bits of each lane to bytes whose bits are the signs of eight weights. The eighth sign
    makes the number of set bits even.
    """
    sevens = packed & 0x7F
    for k in range(1, 4):
        sevens = sevens | ((packed << k) & (0x7F << 8 * k))
    return with_eighths(c, sevens)


def with_eighths(c: Code, sevens: Value) -> Value:
    """Add the eighth sign to bytes of seven signs."""
    raw = sevens.as_lanes("i8")
    folded = (raw ^ (raw >> 4)) & 15
    return (raw | c.lowering.lookup(c, _PARITY, folded)).as_lanes("i32")


def signed(c: Code, group: Value, signs: Value, number: int, zero: int) -> Value:
    """zero ± group: the bits from 4·number on of each lane of `signs` make weights negative."""
    spread = bits.bytes_of_lanes(c, signs, number // 2)
    mask = c.const(spread.type, [1 << (4 * (number % 2) + k) for k in range(4)] * signs.type.lanes)
    negative = (spread & mask).differs(0)
    return c.select(negative, c.const(group.type, zero) - group, group + zero)


def odd_nibbles(words: Sequence[Value], n: int) -> list[Value]:
    """2·s + 1 of `n` nibbles, eight to a word, lowest first."""
    return [(((words[s // 8] >> 4 * (s % 8)) & 15) << 1) | 1 for s in range(n)]


def scale_pairs(scales: Sequence[Value]) -> list[Value]:
    """Scales of sub-blocks, paired like the sums of activations."""
    firsts = [q + k for q in range(0, len(scales), 4) for k in range(2)]
    return [(scales[s] | (scales[s + 2] << 16)).as_lanes("i16") for s in firsts]
