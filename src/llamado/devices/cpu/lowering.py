"""Words of the SIMD language that instruction sets spell differently: integer dot products.

`VNNI` multiplies 32 unsigned by 32 signed bytes and adds groups of four in one instruction (AVX-512 VNNI on 256-bit
registers, or AVX-VNNI). `AVX2` needs a multiply to i16 pairs and keeps adding in i16 while that cannot overflow.
`Portable` is plain LLVM arithmetic. All three give the same integers, so the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from llamado.devices.cpu.simd import I32, Code, I8x32, I16x16, I32x8, Type, Value

_I32x16, _I32x32 = Type("i32", 16), Type("i32", 32)


@dataclass(frozen=True)
class Lowering:
    """One way to spell the words; `columns` is the widest column group its matmul kernels keep in registers."""

    name: str
    columns: int

    # Rows that `matmul_many` unpacks together: the lanes of its vectors.
    panel_rows: int = 8

    # A weight of zero point z is held as u = w + z, unsigned; weights that need all of u8, which AVX2's saturating
    # multiply does not allow, stay signed there.
    full_u8: bool = True

    def dot(
        self, c: Code, sums: list[Value], weights: Sequence[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> None:
        """sums[j] (I32x8) += Σ_g groups of four of weights[g] (unsigned bytes ≤ `peak`; signed ones where a greater
        peak than 127 is not `full_u8`) · x[g][j] (address of 4 signed bytes).
        """
        for w, addresses in zip(weights, x, strict=True):
            for j, address in enumerate(addresses):
                sums[j] = sums[j] + _dot4(c, w.zext(_I32x32), self._spread(c, address).to(_I32x32))

    def dot_scaled(
        self,
        c: Code,
        sums: list[Value],
        weights: Sequence[Value],
        x: Sequence[Sequence[Value]],
        scale: Value,
        peak: int,
    ) -> None:
        """sums[j] += scale · (the dot product of `dot`), `scale` as made by `scale`."""
        part = [c.const(total.type, 0) for total in sums]
        self.dot(c, part, weights, x, peak)
        for j, value in enumerate(part):
            sums[j] = sums[j] + value * scale

    def dot_pairs(self, c: Code, total: Value, a: Value, b: Value) -> Value:
        """total + the sums of neighbouring products of two I16x16."""
        wide = a.to(_I32x16) * b.to(_I32x16)
        even, odd = c.shuffle(wide, None, range(0, 16, 2)), c.shuffle(wide, None, range(1, 16, 2))
        return total + even + odd

    def scale(self, c: Code, value: Value) -> Value:
        """Prepares an I32x8 of small integers (−128 … 127) as the scale of `dot_scaled`."""
        return value

    def lookup(self, c: Code, table: Sequence[int], numbers: Value) -> Value:
        """table[number] for each byte of `numbers` (I8x32 of 0 … 15)."""
        row = [c.const(I8x32, v) for v in table]
        for bit in range(4):
            odd = (numbers & (1 << bit)).differs(0)
            row = [c.select(odd, row[i + 1], row[i]) for i in range(0, len(row), 2)]
        return row[0]

    def _spread(self, c: Code, address: Value) -> Value:
        return c.load(I32, address).splat(8).bits(I8x32)


def _dot4(c: Code, a: Value, b: Value) -> Value:
    product = a * b
    parts = [c.shuffle(product, None, range(k, 32, 4)) for k in range(4)]
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


class Avx2(Lowering):
    """AVX2 with FMA and F16C."""

    def dot(
        self, c: Code, sums: list[Value], weights: Sequence[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> None:
        ones = c.const(I16x16, 1)
        for part, j in self._parts(c, len(sums), weights, x, peak):
            sums[j] = sums[j] + _madd(c, part, ones)

    def dot_scaled(
        self,
        c: Code,
        sums: list[Value],
        weights: Sequence[Value],
        x: Sequence[Sequence[Value]],
        scale: Value,
        peak: int,
    ) -> None:
        for part, j in self._parts(c, len(sums), weights, x, peak):
            sums[j] = sums[j] + _madd(c, part, scale)

    def _parts(
        self, c: Code, columns: int, weights: Sequence[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> list[tuple[Value, int]]:
        """Partial sums in I16x16, each of as many products as i16 holds, with their columns."""
        signed = peak > 127
        many = 1 if signed else 32767 // (2 * 127 * peak)
        parts: list[tuple[Value, int]] = []
        for first in range(0, len(weights), many):
            rows = list(zip(weights[first : first + many], x[first : first + many], strict=True))
            held: list[Value | None] = [None] * columns
            for w, addresses in rows:
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

    def dot_pairs(self, c: Code, total: Value, a: Value, b: Value) -> Value:
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
    """AVX-512 VNNI: 32 registers of 256 or, for panels of 16 rows, 512 bits, operands broadcast from memory."""

    def dot(
        self, c: Code, sums: list[Value], weights: Sequence[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> None:
        for w, addresses in zip(weights, x, strict=True):
            name = f"llvm.x86.avx512.vpdpbusd.{8 * w.type.bytes}"
            for j, address in enumerate(addresses):
                operand = c.load(I32, address).splat(w.type.lanes // 4).bits(w.type)
                sums[j] = c.intrinsic(name, sums[j].type, [sums[j], w, operand])

    dot_scaled = Lowering.dot_scaled
    scale = Lowering.scale

    def dot_pairs(self, c: Code, total: Value, a: Value, b: Value) -> Value:
        return c.intrinsic(f"llvm.x86.avx512.vpdpwssd.{8 * a.type.bytes}", total.type, [total, a, b])


PORTABLE = Lowering("portable", columns=4)
AVX2 = Avx2("avx2", columns=4, full_u8=False)
VNNI = Vnni("vnni", columns=8, panel_rows=16)
LOWERINGS = {lowering.name: lowering for lowering in (PORTABLE, AVX2, VNNI)}


def choose(features: dict[str, bool]) -> Lowering:
    """The best lowering for a CPU's features (LLVM's names); LLAMADO_SIMD=portable|avx2|vnni forces one."""
    forced = os.environ.get("LLAMADO_SIMD")
    if forced:
        if forced not in LOWERINGS:
            raise ValueError(f"LLAMADO_SIMD={forced}: unknown; one of {', '.join(LOWERINGS)}")
        return LOWERINGS[forced]
    if not (features.get("avx2") and features.get("fma") and features.get("f16c")):
        return PORTABLE
    if features.get("avx512vnni") and features.get("avx512vl") and features.get("avx512bw"):
        return VNNI
    return AVX2


def of_this_machine() -> Lowering:
    """The lowering that this machine computes with."""
    import llvmlite.binding as llvm

    return choose(dict(llvm.get_host_cpu_features()))
