"""IQ1_S: f16 d | 32 bytes of the low bits of points | 8 times 16 bits: four times the three high bits, a scale of three
bits, and the sign of the shift of 32 weights; d · (2·scale + 1) · (q ± ⅛).
IQ1_M: 32 bytes of the low bits of points | 16 bytes: twice the three high bits and the sign of the shift of eight
weights | 8 bytes: 16 scales of three bits, and between them the bits of f16 d.
"""

from __future__ import annotations

from collections.abc import Iterator

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.codebooks import points
from llamado.devices.kernels.formats.format import Block256, Blocks256
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import I32, Code, Value
from llamado.gguf.types import TensorType


class _ShiftedCodebook(Blocks256):
    """Groups of eight −1, 0 and 1, shifted by an eighth: integer multiples of an eighth from −9 to 9."""

    peak, zero_shift, of_table = 25, 4, True

    def _book(self, c: Code) -> Value:
        zero = self.zero(c.lowering)
        return points.table(c, self.type, lambda level: zero + 8 * level)


class IQ1_S(_ShiftedCodebook):
    """One shift and one scale for 32 weights."""

    type = TensorType.IQ1_S

    def unpack(self, c: Code, panel: Panel) -> Block256:
        book = self._book(c)
        lows, heads = panel.cells(2, 8), panel.cells(34, 4)
        words = [heads[s // 2] >> (16 * (s % 2)) for s in range(8)]
        scales = [((v >> 12 - 1) & 14) | 1 for v in words]

        def parts() -> Iterator[tuple[list[Value], Value]]:
            for s in range(8):
                shift = _eighth(words[s] << 16)
                groups: list[Value] = []
                for k in range(4):
                    number = points.byte(lows[s], k) | points.above(words[s], 3 * k, 3)
                    groups += [group + shift for group in panel.entries8(book, panel.indices(number))]
                yield groups, c.lowering.scale(c, scales[s])

        return Block256(panel.halves(0) * 0.125, None, points.scale_pairs(scales), parts())


class IQ1_M(_ShiftedCodebook):
    """A scale for 16 weights, a shift for eight."""

    type = TensorType.IQ1_M
    part = 16

    def unpack(self, c: Code, panel: Panel) -> Block256:
        book = self._book(c)
        words = [panel.gather(I32, 48 + 4 * k) for k in range(2)]
        scales = []
        for s in range(16):
            at = 16 * (s // 4 % 2) + 3 * (s % 4)
            word = words[s // 8]
            scales.append(((word >> at - 1 if at else word << 1) & 14) | 1)
        d = (
            ((words[0] >> 12) & 0xF)
            | ((words[0] >> 24) & 0xF0)
            | ((words[1] >> 4) & 0xF00)
            | ((words[1] >> 16) & 0xF000)
        )
        lows, highs = panel.cells(0, 8), panel.cells(32, 4)

        def parts() -> Iterator[tuple[list[Value], Value]]:
            for s in range(16):
                groups: list[Value] = []
                for k in range(2):
                    bit = 8 * (s % 4) + 4 * k
                    number = points.byte(lows[s // 2], 2 * (s % 2) + k) | points.above(highs[s // 4], bit, 3)
                    shift = _eighth(highs[s // 4] << (28 - bit))
                    groups += [group + shift for group in panel.entries8(book, panel.indices(number))]
                yield groups, c.lowering.scale(c, scales[s])

        return Block256(bits.low_half(d) * 0.125, None, points.scale_pairs(scales), parts())


def _eighth(sign: Value) -> Value:
    """−1 in all bytes of the lanes whose sign bit is set, else 1."""
    return (sign.sar(31) | 0x01010101).as_lanes("i8")
