"""Blocks of 32 numbers as caches hold them: eight of one as f32, and a whole one from 32 f32.

Layouts and roundings are those of ggml-common.h (`block_q4_0` …) and of the reference quantisation in ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from llamado.devices.cpu.simd import F16, F32, I32, Code, F32x8, I8x8, I32x8, Value
from llamado.gguf.types import TensorType

_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the sixteen nibbles of IQ4_NL stand for (`kvalues_iq4nl`)."""

QUANTS = {
    TensorType.Q4_0: 2,
    TensorType.Q4_1: 4,
    TensorType.Q5_0: 6,
    TensorType.Q5_1: 8,
    TensorType.Q8_0: 2,
    TensorType.IQ4_NL: 2,
}
"""The types of such blocks, and where in a block the numbers begin."""


def load(c: Code, type_: TensorType, row: Value, index: Value) -> Value:
    """Eight values from element `index` (a multiple of eight) of a row of blocks, as F32x8."""
    block, inside = row + index // 32 * type_.block_bytes, index % 32
    quants = block + QUANTS[type_]
    d = c.load_f16(block).splat(8)
    if type_ == TensorType.Q8_0:
        return c.load(I8x8, quants + inside).to(F32x8) * d
    cells = c.load(I8x8, quants + inside % 16).zext(I32x8)
    number = (cells >> (inside // 16 * 4).to(I32).splat(8)) & 15
    if type_ == TensorType.IQ4_NL:
        return _spread(c, number) * d
    if type_ in (TensorType.Q5_0, TensorType.Q5_1):
        high = c.load(I32, quants - 4).splat(8) >> (inside.to(I32).splat(8) + c.const(I32x8, list(range(8))))
        number = number | ((high & 1) << 4)
    if type_ in (TensorType.Q4_1, TensorType.Q5_1):
        return number.to(F32x8) * d + c.load_f16(block + 2).splat(8)
    return (number - (8 if type_ == TensorType.Q4_0 else 16)).to(F32x8) * d


def _spread(c: Code, number: Value) -> Value:
    """What nibbles of IQ4_NL stand for: halves of the table chosen bit by bit."""
    row = [c.const(F32x8, float(v)) for v in _NL]
    for bit in range(4):
        odd = (number & (1 << bit)).differs(0)
        row = [c.select(odd, row[i + 1], row[i]) for i in range(0, len(row), 2)]
    return row[0]


def store(c: Code, type_: TensorType, to: Value, source: Value) -> None:
    """Quantises the 32 f32 at `source` to one block."""
    values = [c.load(F32x8, source + 32 * v) for v in range(4)]
    if type_ == TensorType.Q8_0:
        _store_q8(c, to, values)
    elif type_ in (TensorType.Q4_1, TensorType.Q5_1):
        _store_from_least(c, type_, to, values)
    elif type_ == TensorType.IQ4_NL:
        _store_nl(c, to, values, _extreme(c, source))
    else:
        _store_around_zero(c, type_, to, values, _extreme(c, source))


def _store_q8(c: Code, to: Value, values: Sequence[Value]) -> None:
    """d = max|x| / 127, q = round(x / d)."""
    peak = c.abs(values[0])
    for v in values[1:]:
        peak = c.max(peak, c.abs(v))
    most = c.max_lanes(peak)
    inverse = c.select(most > 0.0, c.f32(127.0) / most, c.f32(0.0)).splat(8)
    c.store(to, (most / 127.0).to(F16))
    for i, v in enumerate(values):
        c.store(to + 2 + 8 * i, c.round(v * inverse).to(I32x8).to(I8x8))


def _extreme(c: Code, source: Value) -> Value:
    """The number farthest from zero, the first of several."""
    most = c.var(c.f32(0.0))
    with c.range(0, 32) as i:
        v = c.load(F32, source + i * 4)
        most.value = c.select(c.abs(v) > c.abs(most.value), v, most.value)
    return most.value


def _store_around_zero(c: Code, type_: TensorType, to: Value, values: Sequence[Value], extreme: Value) -> None:
    """d = extreme / −zero, q = ⌊x / d + zero + ½⌋, at most all bits."""
    zero = 8 if type_ == TensorType.Q4_0 else 16
    d = extreme / -float(zero)
    inverse = _inverse(c, d)
    c.store(to, d.to(F16))
    _store_numbers(c, type_, to, [v * inverse + (zero + 0.5) for v in values], 2 * zero - 1)


def _store_from_least(c: Code, type_: TensorType, to: Value, values: Sequence[Value]) -> None:
    """d = (greatest − least) / all bits, q = ⌊(x − least) / d + ½⌋."""
    top = 15 if type_ == TensorType.Q4_1 else 31
    least, most = values[0], values[0]
    for v in values[1:]:
        least, most = c.min(least, v), c.max(most, v)
    low, high = -c.max_lanes(-least), c.max_lanes(most)
    d = (high - low) / float(top)
    inverse = _inverse(c, d)
    c.store(to, d.to(F16))
    c.store(to + 2, low.to(F16))
    _store_numbers(c, type_, to, [(v - low.splat(8)) * inverse + 0.5 for v in values], top)


def _store_nl(c: Code, to: Value, values: Sequence[Value], extreme: Value) -> None:
    """The nearest of the table's values at d = extreme / its first, then the d that fits these best."""
    inverse = (c.f32(float(_NL[0])) / extreme).splat(8)
    products, squares, numbers = c.const(F32x8, 0.0), c.const(F32x8, 0.0), []
    for v in values:
        scaled, number = v * inverse, c.const(I32x8, 0)
        for low, high in pairwise(_NL):
            above = scaled >= (low + high) / 2
            number = number + c.select(above, c.const(I32x8, 1), c.const(I32x8, 0))
        numbers.append(number)
        q, weight = _spread(c, number), v * v
        products, squares = products + weight * q * v, squares + weight * q * q
    sum_squares = c.sum_lanes(squares)
    fitting = c.select(sum_squares > 0.0, c.sum_lanes(products) / sum_squares, c.f32(0.0))
    something = c.abs(extreme) >= 1e-15
    c.store(to, c.select(something, fitting, c.f32(0.0)).to(F16))
    none = c.const(I32x8, 0)
    keep = something.splat(8)
    _store_nibbles(c, to + 2, [c.select(keep, number, none) for number in numbers])


def _inverse(c: Code, d: Value) -> Value:
    return c.select(d.differs(0.0), c.f32(1.0) / d, c.f32(0.0)).splat(8)


def _store_numbers(c: Code, type_: TensorType, to: Value, numbers: Sequence[Value], top: int) -> None:
    """Stores ⌊number⌋ of 32 floats, kept to 0 … top, behind the block's scales."""
    whole = [c.min(c.max(v, 0.0), float(top)).to(I32x8) for v in numbers]
    if top == 31:
        bits = c.const(I32x8, 0)
        for i, v in enumerate(whole):
            bits = bits | (((v >> 4) & 1) << c.const(I32x8, list(range(8 * i, 8 * i + 8))))
        for lanes in ((4, 5, 6, 7, 0, 1, 2, 3), (2, 3, 0, 1, 6, 7, 4, 5), (1, 0, 3, 2, 5, 4, 7, 6)):
            bits = bits | c.shuffle(bits, None, lanes)
        c.store(to + QUANTS[type_] - 4, bits.lane(0))
    _store_nibbles(c, to + QUANTS[type_], [v & 15 for v in whole])


def _store_nibbles(c: Code, to: Value, numbers: Sequence[Value]) -> None:
    """32 numbers of four bits: the first half in the low nibbles of 16 bytes, the second in the high ones."""
    for i in range(2):
        c.store(to + 8 * i, (numbers[i] | (numbers[i + 2] << 4)).to(I8x8))
