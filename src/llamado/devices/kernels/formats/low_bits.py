"""Q1_0: f16 d | 16 bytes of bits; d or −d. Q2_0: f16 d | 16 bytes of pairs of bits; d · (q − 1)."""

from __future__ import annotations

from collections.abc import Iterable

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.format import Block32, Blocks32
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import Code, Value
from llamado.gguf.types import TensorType


class Q1_0(Blocks32):
    """Signs, 128 with one scale."""

    type = TensorType.Q1_0
    peak, zero_shift = 2, 0

    def unpack(self, c: Code, panel: Panel) -> Iterable[Block32]:
        d = panel.halves(0)
        for cell in panel.cells(2, 4):
            yield Block32([bits.four_bits(c, cell, group, 2) for group in range(8)], d)


class Q2_0(Blocks32):
    """Two bits, from −1 up, 64 with one scale."""

    type = TensorType.Q2_0
    peak, zero_shift = 3, 0

    def unpack(self, c: Code, panel: Panel) -> Iterable[Block32]:
        d, cells = panel.halves(0), panel.cells(2, 4)
        for part in range(2):
            yield Block32([_pairs(cell, byte) for cell in cells[2 * part : 2 * part + 2] for byte in range(4)], d)


def _pairs(cell: Value, byte: int) -> Value:
    """The four bit pairs of a byte of each lane, one to a byte."""
    v = (cell >> 8 * byte) & 0xFF
    v = v | v << 12
    return ((v | v << 6) & 0x03030303).as_lanes("i8")
