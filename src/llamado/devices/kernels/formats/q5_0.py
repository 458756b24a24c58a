"""Q5_0: f16 d | 4 bytes of fifth bits | 16 bytes of nibbles; d · (q − 16)."""

from __future__ import annotations

from collections.abc import Iterable

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.format import Block32, Blocks32, Cached32
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import F16, I32, Code, F32x8, Value
from llamado.gguf.types import TensorType


class Q5_0(Blocks32, Cached32):
    """Five bits around zero."""

    type = TensorType.Q5_0
    peak, zero_shift = 31, 4

    def unpack(self, c: Code, panel: Panel) -> Iterable[Block32]:
        qh = panel.gather(I32, 2)
        return [Block32(bits.five_bits(c, panel, 6, qh), panel.halves(0))]

    def load_eight(self, c: Code, block: Value, inside: Value) -> Value:
        quants = block + 6
        d = c.load_f16(block).splat(8)
        number = bits.load_nibbles(c, quants, inside)
        number = number | bits.load_fifth_bits(c, quants - 4, inside)
        return (number - 16).to(F32x8) * d

    def store_block(self, c: Code, to: Value, source: Value) -> None:
        d, numbers = bits.around_zero(c, source, 16)
        c.store(to, d.to(F16))
        bits.store_fives(c, to + 2, bits.whole(c, numbers, 31))
