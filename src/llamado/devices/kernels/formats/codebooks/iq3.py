"""IQ3_XXS: f16 d | 64 bytes of points | 8 times 32 bits: four times seven signs, a scale of four bits;
d · (2·scale + 1) / 4 · ±q.
IQ3_S: f16 d | 64 bytes of the low bits of points | 8 bytes of their ninth bits | 32 bytes of signs | 4 bytes: 8 scales;
d · (2·scale + 1) · ±q.
"""

from __future__ import annotations

from collections.abc import Iterator

from llamado.devices.kernels.formats.codebooks import points
from llamado.devices.kernels.formats.format import Block256, Blocks256
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import I32, Code, Value
from llamado.gguf.types import TensorType


class _Fours(Blocks256):
    """Points of four weights of eight magnitudes, each with its sign; a scale for 32 weights."""

    def _book(self, c: Code) -> Value:
        return points.table(c, self.type, lambda level: level)

    def _group(self, c: Code, group: Value, signs: Value, four: int) -> Value:
        return points.signed(c, group, signs, four, self.zero(c.lowering))


class IQ3_XXS(_Fours):
    """An even number of signs among eight weights."""

    type = TensorType.IQ3_XXS
    peak, zero_shift, of_table = 64 + 62, 6, True

    def unpack(self, c: Code, panel: Panel) -> Block256:
        book, cells = self._book(c), panel.cells(66, 8)
        scales = [((cell >> 27) & 30) | 1 for cell in cells]

        def parts() -> Iterator[tuple[list[Value], Value]]:
            for s in range(8):
                signs = points.signs_of_sevens(c, cells[s])
                indices = [panel.indices_at(2 + 8 * s + k) for k in range(8)]
                groups = [self._group(c, panel.entries4(book, eight), signs, k) for k, eight in enumerate(indices)]
                yield groups, c.lowering.scale(c, scales[s])

        return Block256(panel.halves(0) * 0.25, None, points.scale_pairs(scales), parts())


class IQ3_S(_Fours):
    """Independent signs."""

    type = TensorType.IQ3_S
    peak, zero_shift, of_table = 16 + 15, 4, True

    def unpack(self, c: Code, panel: Panel) -> Block256:
        book, signs = self._book(c), panel.cells(74, 8)
        lows = panel.cells(2, 8) + panel.cells(34, 8)
        highs = [panel.gather(I32, 66 + 4 * k) for k in range(2)]
        scales = points.odd_nibbles([panel.gather(I32, 106)], 8)

        def parts() -> Iterator[tuple[list[Value], Value]]:
            for s in range(8):
                groups: list[Value] = []
                for k in range(8):
                    low = points.byte(lows[2 * s + k // 4], k % 4)
                    number = low | points.above(highs[s // 4], 8 * (s % 4) + k, 1)
                    groups.append(self._group(c, panel.entries4(book, panel.indices(number)), signs[s], k))
                yield groups, c.lowering.scale(c, scales[s])

        return Block256(panel.halves(0), None, points.scale_pairs(scales), parts())
