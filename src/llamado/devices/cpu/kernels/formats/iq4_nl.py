"""IQ4_NL: f16 d | 16 bytes of nibbles; d · what the nibble stands for."""

from __future__ import annotations

from itertools import pairwise

from llamado.devices.cpu.kernels.formats import bits
from llamado.devices.cpu.kernels.formats.format import Cached32
from llamado.devices.cpu.simd import F16, Code, F32x8, I32x8, Value
from llamado.gguf.types import TensorType

_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the sixteen nibbles stand for (`kvalues_iq4nl`)."""


class IQ4_NL(Cached32):
    """Four bits, closer together near zero."""

    type = TensorType.IQ4_NL

    def load_eight(self, c: Code, block: Value, inside: Value) -> Value:
        quants = block + 2
        d = c.load_f16(block).splat(8)
        return _spread(c, bits.load_nibbles(c, quants, inside)) * d

    def store_block(self, c: Code, to: Value, source: Value) -> None:
        """The nearest of the table's values at d = extreme / its first, then the d that fits these best."""
        values, extreme = bits.block_values(c, source), bits.extreme(c, source)
        inverse = (c.f32(float(_VALUES[0])) / extreme).splat(8)
        products, squares, numbers = c.const(F32x8, 0.0), c.const(F32x8, 0.0), []
        for v in values:
            scaled, number = v * inverse, c.const(I32x8, 0)
            for low, high in pairwise(_VALUES):
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
        bits.store_nibbles(c, to + 2, [c.select(keep, number, none) for number in numbers])


def _spread(c: Code, number: Value) -> Value:
    """What nibbles stand for: halves of the table chosen bit by bit."""
    row = [c.const(F32x8, float(v)) for v in _VALUES]
    for bit in range(4):
        odd = (number & (1 << bit)).differs(0)
        row = [c.select(odd, row[i + 1], row[i]) for i in range(0, len(row), 2)]
    return row[0]
