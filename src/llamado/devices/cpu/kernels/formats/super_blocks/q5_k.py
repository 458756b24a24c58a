"""Q5_K: as Q4_K, with 32 bytes of fifth bits before the nibbles: bit s of each belongs to sub-block s."""

from __future__ import annotations

from collections.abc import Sequence

from llamado.devices.cpu.kernels.formats import bits
from llamado.devices.cpu.kernels.formats.super_blocks.q4_k import Q4_K
from llamado.devices.cpu.simd import Code, Value
from llamado.gguf.types import TensorType


class Q5_K(Q4_K):
    """Five bits above a minimum, in sub-blocks of 32."""

    type = TensorType.Q5_K
    peak = 31
    nibbles = 48

    def high_bits(self, c: Code, rows: Sequence[Value]) -> list[Value]:
        return bits.cells8(c, rows, 16)

    def widened(self, groups: list[Value], high: Sequence[Value], s: int) -> list[Value]:
        fifths = [bits.place_bit(v.as_lanes("i8"), s, 4) for v in high]
        return [v | b for v, b in zip(groups, fifths, strict=True)]
