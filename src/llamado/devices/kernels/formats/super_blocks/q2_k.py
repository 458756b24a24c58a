"""Q2_K: 16 bytes of four-bit scales and mins of 16 sub-blocks | 64 bytes of pairs of bits | f16 d | f16 dmin;
d · scale · q − dmin · min.
"""

from __future__ import annotations

from collections.abc import Iterator

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.format import Block256, Blocks256
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import I32, Code, Value
from llamado.gguf.types import TensorType

_PAIRS, _D = 16, 80


class Q2_K(Blocks256):
    """Two bits above a minimum, in sub-blocks of 16."""

    type = TensorType.Q2_K
    peak, has_min, part = 3, True, 16

    def unpack(self, c: Code, panel: Panel) -> Block256:
        heads, both = panel.cells(0, 4), panel.gather(I32, _D)
        mins = [(v >> 4) & 0x0F0F0F0F for v in heads]
        pairs = [((v >> shift) & 0x00FF00FF).as_lanes("i16") for v in mins for shift in (0, 8)]

        def parts() -> Iterator[tuple[list[Value], Value]]:
            for half in range(2):
                cells = panel.cells(_PAIRS + 32 * half, 8)
                for quarter in range(4):
                    groups = [(cell.as_lanes("i8") >> (2 * quarter)) & 3 for cell in cells]
                    for k in range(2):
                        s = 8 * half + 2 * quarter + k
                        scale = (heads[s // 4] >> 8 * (s % 4)) & 15
                        yield groups[4 * k : 4 * k + 4], c.lowering.scale(c, scale)

        return Block256(bits.low_half(both), bits.low_half(both >> 16), pairs, parts())
