"""Q4_K: f16 d | f16 dmin | 12 bytes of six-bit scales and mins of 8 sub-blocks | 128 bytes of nibbles;
d · scale · q − dmin · min.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.format import Block256, Blocks256
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import Code, Value
from llamado.gguf.types import TensorType


class Q4_K(Blocks256):
    """Four bits above a minimum, in sub-blocks of 32."""

    type = TensorType.Q4_K
    peak, has_min = 15, True
    nibbles = 16
    """Offset of the nibbles in a super-block."""

    def unpack(self, c: Code, panel: Panel) -> Block256:
        head = panel.cells(0, 4)
        u0, u1, u2 = head[1:]
        scales = [u0 & 0x3F3F3F3F, (u2 & 0x0F0F0F0F) | (((u0 >> 6) & 0x03030303) << 4)]
        mins = [u1 & 0x3F3F3F3F, ((u2 >> 4) & 0x0F0F0F0F) | (((u1 >> 6) & 0x03030303) << 4)]
        pairs = [(v >> shift & 0x00FF00FF).as_lanes("i16") for v in mins for shift in (0, 8)]

        def parts() -> Iterator[tuple[list[Value], Value]]:
            high = self.high_bits(panel)
            for j in range(4):
                groups = bits.nibbles(panel.cells(self.nibbles + 32 * j, 8))
                for half in range(2):
                    s = 2 * j + half
                    scale = (scales[s // 4] >> (8 * (s % 4))) & 0xFF
                    yield self.widened(groups[8 * half : 8 * half + 8], high, s), c.lowering.scale(c, scale)

        return Block256(bits.low_half(head[0]), bits.low_half(head[0] >> 16), pairs, parts())

    def high_bits(self, panel: Panel) -> list[Value]:
        """Cells of the bits that nibbles lack, one bit of each byte per sub-block."""
        return []

    def widened(self, groups: list[Value], high: Sequence[Value], s: int) -> list[Value]:
        """The groups of sub-block `s` with their high bits."""
        return groups
