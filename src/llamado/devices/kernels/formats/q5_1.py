"""Q5_1: f16 d | f16 m | 4 bytes of fifth bits | 16 bytes of nibbles; d · q + m."""

from __future__ import annotations

from collections.abc import Iterable

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.format import Block32, Blocks32, Cached32
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import F16, I32, Code, F32x8, Value
from llamado.gguf.types import TensorType


class Q5_1(Blocks32, Cached32):
    """Five bits above a minimum."""

    type = TensorType.Q5_1
    peak, has_min = 31, True

    def unpack(self, c: Code, panel: Panel) -> Iterable[Block32]:
        both, qh = panel.gather(I32, 0), panel.gather(I32, 4)
        return [Block32(bits.five_bits(c, panel, 8, qh), bits.low_half(both), bits.low_half(both >> 16))]

    def load_eight(self, c: Code, block: Value, inside: Value) -> Value:
        quants = block + 8
        d = c.load_f16(block).splat(8)
        number = bits.load_nibbles(c, quants, inside)
        number = number | bits.load_fifth_bits(c, quants - 4, inside)
        return number.to(F32x8) * d + c.load_f16(block + 2).splat(8)

    def store_block(self, c: Code, to: Value, source: Value) -> None:
        d, least, numbers = bits.from_least(c, source, 31)
        c.store(to, d.to(F16))
        c.store(to + 2, least.to(F16))
        bits.store_fives(c, to + 4, bits.whole(c, numbers, 31))
