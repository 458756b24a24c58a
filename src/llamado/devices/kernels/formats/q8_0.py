"""Q8_0: f16 d | 32 signed bytes; d · q."""

from __future__ import annotations

from collections.abc import Iterable

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.format import Block32, Blocks32, Cached32
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import F16, Code, F32x8, I8x8, I32x8, Value
from llamado.gguf.types import TensorType


class Q8_0(Blocks32, Cached32):
    """Eight bits."""

    type = TensorType.Q8_0
    peak, zero_shift = 255, 7

    def unpack(self, c: Code, panel: Panel) -> Iterable[Block32]:
        groups = [v.as_lanes("i8") for v in panel.cells(2, 8)]
        if not self.signed(c.lowering):
            groups = [v ^ -128 for v in groups]
        return [Block32(groups, panel.halves(0))]

    def load_eight(self, c: Code, block: Value, inside: Value) -> Value:
        quants = block + 2
        d = c.load_f16(block).splat(8)
        return c.load(I8x8, quants + inside).to(F32x8) * d

    def store_block(self, c: Code, to: Value, source: Value) -> None:
        """d = max|x| / 127, q = round(x / d)."""
        values = bits.block_values(c, source)
        peak = c.abs(values[0])
        for v in values[1:]:
            peak = c.max(peak, c.abs(v))
        most = c.max_lanes(peak)
        inverse = c.select(most > 0.0, c.f32(127.0) / most, c.f32(0.0)).splat(8)
        c.store(to, (most / 127.0).to(F16))
        for i, v in enumerate(values):
            c.store(to + 2 + 8 * i, c.round(v * inverse).to(I32x8).to(I8x8))
