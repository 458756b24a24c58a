"""Q6_K: 128 bytes of nibbles | 64 bytes of pairs of high bits | 16 signed bytes of scales | f16 d;
d · scale · (q − 32).
"""

from __future__ import annotations

from collections.abc import Iterator

from llamado.devices.kernels.formats.format import Block256, Blocks256
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import Code, Value
from llamado.gguf.types import TensorType

_HIGH, _SCALES, _D = 128, 192, 208


class Q6_K(Blocks256):
    """Six bits around zero, in sub-blocks of 16."""

    type = TensorType.Q6_K
    peak, zero_shift, part = 63, 5, 16

    def unpack(self, c: Code, panel: Panel) -> Block256:
        scales = panel.cells(_SCALES, 4)
        pairs: list[Value] = []
        for v in scales:
            words = v.as_lanes("i16")
            pairs += [(words << 8).sar(8), words.sar(8)]

        def parts() -> Iterator[tuple[list[Value], Value]]:
            for half in range(2):
                low = [panel.cells(64 * half + 32 * k, 8) for k in range(2)]
                high = panel.cells(_HIGH + 32 * half, 8)
                for quarter in range(4):
                    groups = [_six_bits(low[quarter % 2][g], high[g], quarter) for g in range(8)]
                    for k in range(2):
                        s = 8 * half + 2 * quarter + k
                        scale = (scales[s // 4] << (24 - 8 * (s % 4))).sar(24)
                        yield groups[4 * k : 4 * k + 4], c.lowering.scale(c, scale)

        return Block256(panel.halves(_D), None, pairs, parts())


def _six_bits(low: Value, high: Value, quarter: int) -> Value:
    """A group of a quarter of 128 weights: nibbles of `low`, and above them bits 2·quarter and the next of `high`."""
    nibble = (low.as_lanes("i8") >> (4 * (quarter // 2))) & 15
    two = high.as_lanes("i8")
    if quarter < 2:
        two = two << (4 - 2 * quarter)
    elif quarter > 2:
        two = two >> (2 * quarter - 4)
    return nibble | (two & 0x30)
