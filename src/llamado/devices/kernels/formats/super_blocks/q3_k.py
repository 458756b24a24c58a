"""Q3_K: 32 bytes of high bits | 64 bytes of pairs of low bits | 12 bytes of six-bit scales of 16 sub-blocks | f16 d;
d · (scale − 32) · (q − 4).
"""

from __future__ import annotations

from collections.abc import Iterator

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.format import Block256, Blocks256
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import I32, Code, Value
from llamado.gguf.types import TensorType

_LOW, _SCALES, _D = 32, 96, 108


class Q3_K(Blocks256):
    """Three bits around zero, in sub-blocks of 16."""

    type = TensorType.Q3_K
    peak, zero_shift, part = 7, 2, 16

    def unpack(self, c: Code, panel: Panel) -> Block256:
        u0, u1, u2 = (panel.gather(I32, _SCALES + 4 * i) for i in range(3))
        scales = [
            ((low >> shift) & 0x0F0F0F0F) | (((u2 >> 2 * i) & 0x03030303) << 4)
            for i, (low, shift) in enumerate(((u0, 0), (u1, 0), (u0, 4), (u1, 4)))
        ]
        pairs = [((v >> shift) & 0x00FF00FF).as_lanes("i16") - 32 for v in scales for shift in (0, 8)]

        def parts() -> Iterator[tuple[list[Value], Value]]:
            high = panel.cells(0, 8)
            for half in range(2):
                low = panel.cells(_LOW + 32 * half, 8)
                for quarter in range(4):
                    groups = [
                        ((pair.as_lanes("i8") >> (2 * quarter)) & 3)
                        | bits.place_bit(bit.as_lanes("i8"), 4 * half + quarter, 2)
                        for pair, bit in zip(low, high, strict=True)
                    ]
                    for k in range(2):
                        s = 8 * half + 2 * quarter + k
                        scale = ((scales[s // 4] >> 8 * (s % 4)) & 0xFF) - 32
                        yield groups[4 * k : 4 * k + 4], c.lowering.scale(c, scale)

        return Block256(panel.halves(_D), None, pairs, parts())
