"""Integer dot products of x86.

`Vnni` multiplies unsigned by signed bytes and adds groups of four in one instruction. `Avx2` multiplies to pairs of i16
and keeps adding in i16 while that cannot overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from llamado.devices.lowering import Lowering
from llamado.devices.simd import I32, Code, I8x32, I16x16, I32x8, Type, Value


class Avx2(Lowering):
    """AVX2 with FMA and F16C."""

    def dot(
        self, c: Code, sums: list[Value], weights: Iterable[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> None:
        ones = c.const(I16x16, 1)
        for part, j in self._parts(c, len(sums), weights, x, peak):
            sums[j] = sums[j] + _madd(c, part, ones)

    def dot_scaled(
        self,
        c: Code,
        sums: list[Value],
        weights: Iterable[Value],
        x: Sequence[Sequence[Value]],
        scale: Value,
        peak: int,
    ) -> None:
        for part, j in self._parts(c, len(sums), weights, x, peak):
            sums[j] = sums[j] + _madd(c, part, scale)

    def _parts(
        self, c: Code, columns: int, weights: Iterable[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> list[tuple[Value, int]]:
        """Partial sums in I16x16, each of as many products as i16 can hold, with their columns."""
        signed = peak > 127
        many = 1 if signed else 32767 // (2 * 127 * peak)
        parts: list[tuple[Value, int]] = []
        rest = iter(weights)
        for first in range(0, len(x), many):
            held: list[Value | None] = [None] * columns
            for addresses, w in zip(x[first : first + many], rest, strict=False):
                magnitude = c.intrinsic("llvm.abs.v32i8", I8x32, [w, c.const(Type("i1"), 0)]) if signed else w
                for j, address in enumerate(addresses):
                    operand = self._spread(c, address)
                    if signed:
                        operand = c.intrinsic("llvm.x86.avx2.psign.b", I8x32, [operand, w])
                    product = _maddubs(c, magnitude, operand)
                    before = held[j]
                    held[j] = product if before is None else before + product
            parts += [(value, j) for j, value in enumerate(held) if value is not None]
        return parts

    def _spread(self, c: Code, address: Value) -> Value:
        return c.load(I32, address).splat(8).bits(I8x32)

    def _add_pairs(self, c: Code, total: Value, a: Value, b: Value) -> Value:
        return total + _madd(c, a, b)

    def scale(self, c: Code, value: Value) -> Value:
        low = value & 0xFFFF
        return (low | (low << 16)).bits(I16x16)

    def lookup(self, c: Code, table: Sequence[int], numbers: Value) -> Value:
        return c.intrinsic("llvm.x86.avx2.pshuf.b", I8x32, [c.const(I8x32, [*table, *table]), numbers])


def _maddubs(c: Code, unsigned: Value, signed: Value) -> Value:
    return c.intrinsic("llvm.x86.avx2.pmadd.ub.sw", I16x16, [unsigned, signed])


def _madd(c: Code, a: Value, b: Value) -> Value:
    return c.intrinsic("llvm.x86.avx2.pmadd.wd", I32x8, [a, b])


class Vnni(Avx2):
    """VNNI. With AVX-512: 32 registers of 256 bits or, for panels of 16 rows, 512 bits, and operands broadcast from
    memory. As AVX-VNNI: 16 registers of 256 bits.
    """

    def dot(
        self, c: Code, sums: list[Value], weights: Iterable[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> None:
        for w, addresses in zip(weights, x, strict=True):
            name = f"llvm.x86.avx512.vpdpbusd.{8 * w.type.bytes}"
            for j, address in enumerate(addresses):
                operand = c.load(I32, address).splat(w.type.lanes // 4).bits(w.type)
                sums[j] = c.intrinsic(name, sums[j].type, [sums[j], w, operand])

    dot_scaled = Lowering.dot_scaled
    scale = Lowering.scale

    def lookup(self, c: Code, table: Sequence[int], numbers: Value) -> Value:
        if numbers.type.bytes == 32:
            return super().lookup(c, table, numbers)
        return c.intrinsic("llvm.x86.avx512.pshuf.b.512", numbers.type, [c.const(numbers.type, [*table] * 4), numbers])

    def _add_pairs(self, c: Code, total: Value, a: Value, b: Value) -> Value:
        return c.intrinsic(f"llvm.x86.avx512.vpdpwssd.{8 * a.type.bytes}", total.type, [total, a, b])


_AVX2 = ("avx2", "fma", "f16c")
AVX2 = Avx2("avx2", columns=4, needs=_AVX2, without=("avx512", "avxvnni"), full_u8=False)
AVX_VNNI = Vnni("avx-vnni", columns=4, needs=(*_AVX2, "avxvnni"), without=("avx512",))
_VNNI = (*_AVX2, "avx512vnni", "avx512vl", "avx512bw")
VNNI_256 = Vnni("vnni-256", columns=8, needs=_VNNI)
VNNI = replace(VNNI_256, name="vnni", panel_rows=16, groups=2, passes=2)
AMX = replace(VNNI, name="amx", needs=(*_VNNI, "amx-tile", "amx-int8"), tiles=True)
