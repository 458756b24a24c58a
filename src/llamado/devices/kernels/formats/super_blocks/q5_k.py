"""Q5_K: as Q4_K, with 32 bytes of fifth bits before the nibbles: bit s of each belongs to sub-block s."""

from __future__ import annotations

from collections.abc import Sequence

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.kernels.formats.super_blocks.q4_k import Q4_K
from llamado.devices.simd import Value
from llamado.gguf.types import TensorType


class Q5_K(Q4_K):
    """Five bits above a minimum, in sub-blocks of 32."""

    type = TensorType.Q5_K
    peak = 31
    nibbles = 48

    def high_bits(self, panel: Panel) -> list[Value]:
        return panel.cells(16, 8)

    def widened(self, groups: list[Value], high: Sequence[Value], s: int) -> list[Value]:
        fifths = [bits.place_bit(v.as_lanes("i8"), s, 4) for v in high]
        return [v | b for v, b in zip(groups, fifths, strict=True)]
