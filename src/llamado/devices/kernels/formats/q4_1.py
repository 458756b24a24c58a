"""Q4_1: f16 d | f16 m | 16 bytes of nibbles; d · q + m."""

from __future__ import annotations

from collections.abc import Iterable

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.format import Block32, Blocks32, Cached32
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import F16, I32, Code, F32x8, Value
from llamado.gguf.types import TensorType


class Q4_1(Blocks32, Cached32):
    """Four bits above a minimum."""

    type = TensorType.Q4_1
    peak, has_min = 15, True

    def unpack(self, c: Code, panel: Panel) -> Iterable[Block32]:
        both = panel.gather(I32, 0)
        return [Block32(bits.nibbles(panel.cells(4, 4)), bits.low_half(both), bits.low_half(both >> 16))]

    def load_eight(self, c: Code, block: Value, inside: Value) -> Value:
        quants = block + 4
        d = c.load_f16(block).splat(8)
        return bits.load_nibbles(c, quants, inside).to(F32x8) * d + c.load_f16(block + 2).splat(8)

    def store_block(self, c: Code, to: Value, source: Value) -> None:
        d, least, numbers = bits.from_least(c, source, 15)
        c.store(to, d.to(F16))
        c.store(to + 2, least.to(F16))
        bits.store_nibbles(c, to + 4, [v & 15 for v in bits.whole(c, numbers, 15)])
