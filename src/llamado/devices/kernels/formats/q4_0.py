"""Q4_0: f16 d | 16 bytes of nibbles; d · (q − 8)."""

from __future__ import annotations

from collections.abc import Iterable

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.format import Block32, Blocks32, Cached32
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import F16, Code, F32x8, Value
from llamado.gguf.types import TensorType


class Q4_0(Blocks32, Cached32):
    """Four bits around zero."""

    type = TensorType.Q4_0
    peak, zero_shift = 15, 3

    def unpack(self, c: Code, panel: Panel) -> Iterable[Block32]:
        return [Block32(bits.nibbles(panel.cells(2, 4)), panel.halves(0))]

    def load_eight(self, c: Code, block: Value, inside: Value) -> Value:
        quants = block + 2
        d = c.load_f16(block).splat(8)
        return (bits.load_nibbles(c, quants, inside) - 8).to(F32x8) * d

    def store_block(self, c: Code, to: Value, source: Value) -> None:
        d, numbers = bits.around_zero(c, source, 8)
        c.store(to, d.to(F16))
        bits.store_nibbles(c, to + 2, [v & 15 for v in bits.whole(c, numbers, 15)])
