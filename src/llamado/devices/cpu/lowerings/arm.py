"""Integer dot products of 64-bit ARM.

`Neon` has an instruction that multiplies 16 signed by 16 signed bytes and adds groups of four (`sdot`, ARMv8.2). It
takes four bytes of activations out of a register by number: where four lie side by side they are loaded at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llamado.devices.cpu.lowerings.lowering import Lowering
from llamado.devices.cpu.simd import I32, Code, I32x4, I32x8, Type, Value

_I8x16 = Type("i8", 16)


class Neon(Lowering):
    """Dot products of signed bytes in 32 registers of 128 bits; weights that need all eight bits stay signed."""

    def dot(
        self, c: Code, sums: list[Value], weights: Iterable[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> None:
        operands = _operands(c, x)
        halves = [[c.shuffle(total, None, range(4 * h, 4 * h + 4)) for h in range(2)] for total in sums]
        for w, line in zip(weights, operands, strict=True):
            parts = [c.shuffle(w, None, range(16 * h, 16 * h + 16)) for h in range(2)]
            for both, operand in zip(halves, line, strict=True):
                for h, part in enumerate(parts):
                    both[h] = c.intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", I32x4, [both[h], part, operand])
        for j, (low, high) in enumerate(halves):
            sums[j] = c.concat(low, high)

    def dot_pairs(self, c: Code, total: Value, a: Value, b: Value) -> Value:
        for odd in range(2):
            ones = [c.shuffle(v, None, range(odd, 16, 2)).to(I32x8) for v in (a, b)]
            total = total + ones[0] * ones[1]
        return total

    def lookup(self, c: Code, table: Sequence[int], numbers: Value) -> Value:
        row = c.const(_I8x16, table)
        halves = [c.shuffle(numbers, None, range(16 * h, 16 * h + 16)) for h in range(2)]
        return c.concat(*(c.intrinsic("llvm.aarch64.neon.tbl1.v16i8", _I8x16, [row, half]) for half in halves))


def _operands(c: Code, x: Sequence[Sequence[Value]]) -> list[list[Value]]:
    """For each address four times the four bytes there; one load for four addresses that lie side by side."""
    places = {address.place(): address for line in x for address in line}
    found: dict[tuple[int, int], Value] = {}
    for (base, offset), address in sorted(places.items(), key=lambda item: item[0]):
        beside = [(base, offset + 4 * k) for k in range(4)]
        if (base, offset) in found:
            continue
        if all(place in places for place in beside):
            quad = c.load(I32x4, address)
            for k, place in enumerate(beside):
                found[place] = c.shuffle(quad, None, [k] * 4).bits(_I8x16)
        else:
            found[base, offset] = c.load(I32, address).splat(4).bits(_I8x16)
    return [[found[address.place()] for address in line] for line in x]


NEON = Neon("neon", columns=4, needs=("neon", "dotprod"), full_u8=False)
