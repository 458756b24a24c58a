"""IQ2_XXS: f16 d | 8 times 8 bytes: four points, and 32 bits: four times seven signs, a scale of four bits.
IQ2_XS: f16 d | 32 times 16 bits: a point of nine bits, seven signs | 8 bytes: 16 scales.
IQ2_S: f16 d | 32 bytes of the low bits of points | 32 bytes of signs | 8 bytes of the pairs of high bits | 8 bytes: 16
scales.
All: d · (2·scale + 1) / 8 · ±q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llamado.devices.kernels.formats.codebooks import points
from llamado.devices.kernels.formats.format import Block256, Blocks256
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import I32, Code, Value
from llamado.gguf.types import TensorType


class _Eights(Blocks256):
    """Points of eight weights of three magnitudes, each with its sign."""

    peak, zero_shift, of_table = 64 + 43, 6, True

    def _book(self, c: Code) -> Value:
        return points.table(c, self.type, lambda level: level)

    def _groups(self, c: Code, pair: Sequence[Value], signs: Value, eight: int) -> list[Value]:
        zero = self.zero(c.lowering)
        return [points.signed(c, group, signs, 2 * eight + k, zero) for k, group in enumerate(pair)]


class IQ2_XXS(_Eights):
    """A scale for 32 weights."""

    type = TensorType.IQ2_XXS

    def unpack(self, c: Code, panel: Panel) -> Block256:
        book = self._book(c)
        cells = panel.cells(2, 8) + panel.cells(34, 8)
        scales = [((cells[2 * s + 1] >> 27) & 30) | 1 for s in range(8)]

        def parts() -> Iterator[tuple[list[Value], Value]]:
            for s in range(8):
                signs = points.signs_of_sevens(c, cells[2 * s + 1])
                groups: list[Value] = []
                for k in range(4):
                    groups += self._groups(c, panel.entries8(book, panel.indices_at(2 + 8 * s + k)), signs, k)
                yield groups, c.lowering.scale(c, scales[s])

        return Block256(panel.halves(0) * 0.125, None, points.scale_pairs(scales), parts())


class IQ2_XS(_Eights):
    """A scale for 16 weights."""

    type = TensorType.IQ2_XS
    part = 16

    def unpack(self, c: Code, panel: Panel) -> Block256:
        book = self._book(c)
        cells = panel.cells(2, 8) + panel.cells(34, 8)
        scales = points.odd_nibbles([panel.gather(I32, 66 + 4 * k) for k in range(2)], 16)

        def parts() -> Iterator[tuple[list[Value], Value]]:
            for s in range(16):
                cell = cells[s]
                signs = points.with_eighths(c, ((cell >> 9) & 0x7F) | ((cell >> 17) & 0x7F00))
                groups: list[Value] = []
                for k in range(2):
                    groups += self._groups(c, panel.entries8(book, panel.indices((cell >> 16 * k) & 511)), signs, k)
                yield groups, c.lowering.scale(c, scales[s])

        return Block256(panel.halves(0) * 0.125, None, points.scale_pairs(scales), parts())


class IQ2_S(_Eights):
    """A scale for 16 weights, and independent signs."""

    type = TensorType.IQ2_S
    part = 16

    def unpack(self, c: Code, panel: Panel) -> Block256:
        book = self._book(c)
        lows, signs = panel.cells(2, 8), panel.cells(34, 8)
        highs = [panel.gather(I32, 66 + 4 * k) for k in range(2)]
        scales = points.odd_nibbles([panel.gather(I32, 74 + 4 * k) for k in range(2)], 16)

        def parts() -> Iterator[tuple[list[Value], Value]]:
            for s in range(8):
                for half in range(2):
                    groups: list[Value] = []
                    for k in (2 * half, 2 * half + 1):
                        number = points.byte(lows[s], k) | points.above(highs[s // 4], 8 * (s % 4) + 2 * k, 2)
                        groups += self._groups(c, panel.entries8(book, panel.indices(number)), signs[s], k)
                    yield groups, c.lowering.scale(c, scales[2 * s + half])

        return Block256(panel.halves(0) * 0.125, None, points.scale_pairs(scales), parts())
