"""Bit operations shared by several formats: unpacking weights, and packing numbers for caches."""

from __future__ import annotations

from collections.abc import Sequence

from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import F32, I32, Code, F32x8, I8x8, I32x8, Value

# --- a block of each of eight or sixteen rows -------------------------------------------------------------------------


def low_half(v: Value) -> Value:
    """The f16 in the low half of each i32 lane as f32."""
    return v.cast("i16").as_lanes("f16").cast("f32")


def nibbles(cells: Sequence[Value]) -> list[Value]:
    """Unpack transposed cells of nibbles to the groups of all low nibbles, then of all high ones."""
    raw = [v.as_lanes("i8") for v in cells]
    return [v & 15 for v in raw] + [v >> 4 for v in raw]


def four_bits(c: Code, word: Value, group: int, one: int) -> Value:
    """Bits 4·group … 4·group+3 of each row's 32-bit `word` as `one` or 0 in the four bytes of its lane."""
    byte = group // 2
    spread = bytes_of_lanes(c, word, byte)
    bits = c.const(spread.type, [1 << (4 * (group % 2) + k) for k in range(4)] * word.type.lanes)
    chosen = (spread & bits).equals(bits)
    return c.select(chosen, c.const(spread.type, one), c.const(spread.type, 0))


def bytes_of_lanes(c: Code, word: Value, byte: int) -> Value:
    """Byte `byte` of each 32-bit lane in all four of its bytes."""
    lanes = [4 * lane + byte for lane in range(word.type.lanes) for _ in range(4)]
    return c.shuffle(word.as_lanes("i8"), None, lanes)


def five_bits(c: Code, panel: Panel, offset: int, qh: Value) -> list[Value]:
    """The groups of five-bit weights: nibbles at `offset`, fifth bits in `qh`."""
    groups = nibbles(panel.cells(offset, 4))
    return [v | four_bits(c, qh, g, 16) for g, v in enumerate(groups)]


def place_bit(v: Value, source: int, target: int) -> Value:
    """Move bit `source` of each byte to bit `target`, and clear all other bits."""
    moved = v << (target - source) if target >= source else v >> (source - target)
    return moved & (1 << target)


# --- one block of a cache ---------------------------------------------------------------------------------------------


def load_nibbles(c: Code, quants: Value, inside: Value) -> Value:
    """The eight nibbles of 16 packed bytes from number `inside` on, as I32x8."""
    cells = c.load(I8x8, quants + inside % 16).zext(I32x8)
    return (cells >> (inside // 16 * 4).to(I32).splat(8)) & 15


def load_fifth_bits(c: Code, at: Value, inside: Value) -> Value:
    """The fifth bits (16 or 0) of eight numbers from number `inside` on. The bits of all 32 are the i32 at `at`."""
    high = c.load(I32, at).splat(8) >> (inside.to(I32).splat(8) + c.const(I32x8, list(range(8))))
    return (high & 1) << 4


def block_values(c: Code, source: Value) -> list[Value]:
    """The 32 f32 at `source`."""
    return [c.load(F32x8, source + 32 * v) for v in range(4)]


def extreme(c: Code, source: Value) -> Value:
    """The number farthest from zero of 32 f32; the first one if there are several."""
    most = c.var(c.f32(0.0))
    with c.range(0, 32) as i:
        v = c.load(F32, source + i * 4)
        most.value = c.select(c.abs(v) > c.abs(most.value), v, most.value)
    return most.value


def inverse(c: Code, d: Value) -> Value:
    """1 / d, 0 for 0, in eight lanes."""
    return c.select(d.differs(0.0), c.f32(1.0) / d, c.f32(0.0)).splat(8)


def around_zero(c: Code, source: Value, zero: int) -> tuple[Value, list[Value]]:
    """d = extreme / −zero, and the 32 numbers x / d + zero + ½, to be truncated and limited to the format's bits."""
    values, most = block_values(c, source), extreme(c, source)
    d = most / -float(zero)
    by = inverse(c, d)
    return d, [v * by + (zero + 0.5) for v in values]


def from_least(c: Code, source: Value, top: int) -> tuple[Value, Value, list[Value]]:
    """d = (maximum − minimum) / top, the minimum, and the 32 numbers (x − minimum) / d + ½, to be truncated."""
    values = block_values(c, source)
    least, most = values[0], values[0]
    for v in values[1:]:
        least, most = c.min(least, v), c.max(most, v)
    low, high = -c.max_lanes(-least), c.max_lanes(most)
    d = (high - low) / float(top)
    by = inverse(c, d)
    return d, low, [(v - low.splat(8)) * by + 0.5 for v in values]


def whole(c: Code, numbers: Sequence[Value], top: int) -> list[Value]:
    """⌊number⌋, limited to 0 … top."""
    return [c.min(c.max(v, 0.0), float(top)).to(I32x8) for v in numbers]


def store_nibbles(c: Code, to: Value, numbers: Sequence[Value]) -> None:
    """Store 32 numbers of four bits: the first half in the low nibbles of 16 bytes, the second in the high ones."""
    for i in range(2):
        c.store(to + 8 * i, (numbers[i] | (numbers[i + 2] << 4)).to(I8x8))


def store_fives(c: Code, to: Value, numbers: Sequence[Value]) -> None:
    """Store 32 numbers of five bits: the fifth bits in four bytes, then the nibbles."""
    bits = c.const(I32x8, 0)
    for i, v in enumerate(numbers):
        bits = bits | (((v >> 4) & 1) << c.const(I32x8, list(range(8 * i, 8 * i + 8))))
    for lanes in ((4, 5, 6, 7, 0, 1, 2, 3), (2, 3, 0, 1, 6, 7, 4, 5), (1, 0, 3, 2, 5, 4, 7, 6)):
        bits = bits | c.shuffle(bits, None, lanes)
    c.store(to, bits.lane(0))
    store_nibbles(c, to + 4, [v & 15 for v in numbers])
