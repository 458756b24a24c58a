"""TQ1_0: 48 bytes of five weights each | 4 bytes of four weights each | f16 d.
TQ2_0: 64 bytes of pairs of bits | f16 d.
Both: d · (q − 1), q from 0 to 2. A byte of TQ1_0 is a fraction of 256 whose digits to base 3 are the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llamado.devices.kernels.formats.format import Block256, Blocks256
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import I32, Code, Type, Value
from llamado.gguf.types import TensorType


class _Ternary(Blocks256):
    """Ternary weights, with d as the only scale."""

    zero_shift, has_scales = 0, False

    def _block(self, c: Code, d: Value, groups: Iterator[Value]) -> Block256:
        def parts() -> Iterator[tuple[list[Value], None]]:
            for _ in range(self.n_parts):
                yield [next(groups) for _ in range(8)], None

        return Block256(d, None, [c.const(Type("i16", 2 * d.type.lanes), 1)] * self.n_pairs, parts())


class TQ1_0(_Ternary):
    """Ternary digits, five to a byte."""

    type = TensorType.TQ1_0
    peak = 2

    def unpack(self, c: Code, panel: Panel) -> Block256:
        def groups() -> Iterator[Value]:
            yield from _digits(panel.cells(0, 8), 5)
            yield from _digits(panel.cells(32, 4), 5)
            yield from _digits([panel.gather(I32, 48)], 4)

        return self._block(c, panel.halves(52), groups())


class TQ2_0(_Ternary):
    """Ternary digits of two bits."""

    type = TensorType.TQ2_0
    peak = 3  # any two bits

    def unpack(self, c: Code, panel: Panel) -> Block256:
        def groups() -> Iterator[Value]:
            for half in range(2):
                cells = panel.cells(32 * half, 8)
                for quarter in range(4):
                    yield from ((cell.as_lanes("i8") >> (2 * quarter)) & 3 for cell in cells)

        return self._block(c, panel.halves(64), groups())


def _digits(cells: Sequence[Value], n: int) -> Iterator[Value]:
    """The first digits of all bytes, then the second: each is the integer part of three times the fraction."""
    even = [cell.as_lanes("i16") & 0x00FF for cell in cells]
    odd = [cell.as_lanes("i16") >> 8 for cell in cells]
    for _ in range(n):
        even, odd = [v * 3 for v in even], [v * 3 for v in odd]
        for low, high in zip(even, odd, strict=True):
            yield ((low >> 8) | (high & -256)).as_lanes("i8")
        even, odd = [v & 0x00FF for v in even], [v & 0x00FF for v in odd]
