"""IQ4_NL: f16 d | 16 bytes of nibbles; d · value of the nibble.
IQ4_XS: f16 d | 16 bits with the high pairs of eight scales | 4 bytes of their low nibbles | 128 bytes of nibbles;
d · (scale − 32) · value of the nibble.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.format import Block32, Block256, Blocks, Blocks32, Blocks256, Cached32
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import F16, I32, Code, F32x8, I32x8, Value
from llamado.gguf.types import TensorType

_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the sixteen nibbles (`kvalues_iq4nl`)."""


class IQ4_NL(Blocks32, Cached32):
    """Four bits, with levels closer together near zero."""

    type = TensorType.IQ4_NL
    peak, zero_shift = 241, 7

    def unpack(self, c: Code, panel: Panel) -> Iterable[Block32]:
        numbers = bits.nibbles(panel.cells(2, 4))
        return [Block32(_weights(c, self, numbers), panel.halves(0))]

    def load_eight(self, c: Code, block: Value, inside: Value) -> Value:
        quants = block + 2
        d = c.load_f16(block).splat(8)
        return _spread(c, bits.load_nibbles(c, quants, inside)) * d

    def store_block(self, c: Code, to: Value, source: Value) -> None:
        """Take the nearest of the table's values at d = extreme / its first, then the d that fits these best."""
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


class IQ4_XS(Blocks256):
    """The same four bits, in sub-blocks of 32."""

    type = TensorType.IQ4_XS
    peak, zero_shift = 241, 7

    def unpack(self, c: Code, panel: Panel) -> Block256:
        head, low = panel.gather(I32, 0), panel.gather(I32, 4)
        scales = [(((low >> 4 * s) & 15) | (((head >> 16 + 2 * s) & 3) << 4)) - 32 for s in range(8)]
        pairs = [((scales[s] & 0xFFFF) | (scales[s + 2] << 16)).as_lanes("i16") for s in (0, 1, 4, 5)]

        def parts() -> Iterator[tuple[list[Value], Value]]:
            for j in range(4):
                groups = bits.nibbles(panel.cells(8 + 32 * j, 8))
                for half in range(2):
                    numbers = groups[4 * half : 4 * half + 4] + groups[8 + 4 * half : 12 + 4 * half]
                    yield _weights(c, self, numbers), c.lowering.scale(c, scales[2 * j + half])

        return Block256(bits.low_half(head), None, pairs, parts())


def _weights(c: Code, form: Blocks, numbers: Sequence[Value]) -> list[Value]:
    """Groups of the values of nibbles."""
    table = [v + form.zero(c.lowering) for v in _VALUES]
    return [c.lowering.lookup(c, table, number) for number in numbers]


def _spread(c: Code, number: Value) -> Value:
    """Values of nibbles: halves of the table selected bit by bit."""
    row = [c.const(F32x8, float(v)) for v in _VALUES]
    for bit in range(4):
        odd = (number & (1 << bit)).differs(0)
        row = [c.select(odd, row[i + 1], row[i]) for i in range(0, len(row), 2)]
    return row[0]
