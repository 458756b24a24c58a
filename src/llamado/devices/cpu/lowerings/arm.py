"""Integer dot products of 64-bit ARM.

`Neon` has an instruction that multiplies 16 signed by 16 signed bytes and adds groups of four (`sdot`, ARMv8.2). It
takes four bytes of activations from a numbered lane of a register, so four adjacent operands are loaded at once.

`I8mm` multiplies eight bytes of each of two rows with eight of each of two columns in one instruction (`smmla`,
ARMv8.6): twice as many products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llamado.devices.lowering import Lowering
from llamado.devices.simd import I32, Code, I32x4, I32x8, Type, Value

_I8x8, _I8x16 = Type("i8", 8), Type("i8", 16)


class Neon(Lowering):
    """Dot products of signed bytes in 32 registers of 128 bits; weights that need all eight bits stay signed."""

    def dot(
        self, c: Code, sums: list[Value], weights: Iterable[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> None:
        operands = [[_lanes(c, word, 4).bits(_I8x16) for word in line] for line in _words(c, x)]
        halves = [[c.shuffle(total, None, range(4 * h, 4 * h + 4)) for h in range(2)] for total in sums]
        for w, line in zip(weights, operands, strict=True):
            parts = [c.shuffle(w, None, range(16 * h, 16 * h + 16)) for h in range(2)]
            for both, operand in zip(halves, line, strict=True):
                for h, part in enumerate(parts):
                    both[h] = c.intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", I32x4, [both[h], part, operand])
        for j, (low, high) in enumerate(halves):
            sums[j] = c.concat(low, high)

    def dot_pairs(self, c: Code, pairs: Sequence[Value], x: Sequence[Sequence[Value]], j: int) -> Value:
        total = c.const(I32x8, 0)
        for pair, line in zip(pairs, _words(c, x), strict=True):
            register, number = line[j]
            for odd in range(2):
                factor = _lanes(c, (register.as_lanes("i16"), 2 * number + odd), 8)
                total = total + c.shuffle(pair, None, range(odd, 16, 2)).to(I32x8) * factor.to(I32x8)
        return total

    def lookup(self, c: Code, table: Sequence[int], numbers: Value) -> Value:
        row = c.const(_I8x16, table)
        halves = [c.shuffle(numbers, None, range(16 * h, 16 * h + 16)) for h in range(2)]
        return c.concat(*(c.intrinsic("llvm.aarch64.neon.tbl1.v16i8", _I8x16, [row, half]) for half in halves))


class I8mm(Neon):
    """Products of two rows with two columns, for an even number of columns.

    Weights are arranged in pairs of rows: two consecutive groups become two vectors of two pairs each, eight bytes of a
    row followed by eight of the next. Sums stay in the instruction's layout: those of two columns alternate, row by
    row, (r₀c₀, r₀c₁, r₁c₀, r₁c₁), …, in two vectors.
    """

    def arrange(self, c: Code, groups: Sequence[Value], columns: int) -> list[Value]:
        if columns % 2:
            return list(groups)
        return [pair.as_lanes("i8") for pair in _in_turn(c, [group.bits(I32x8) for group in groups])]

    def hold(self, c: Code, sums: Sequence[Value]) -> list[Value]:
        return list(sums) if len(sums) % 2 else _in_turn(c, sums)

    def release(self, c: Code, held: Sequence[Value]) -> list[Value]:
        if len(held) % 2:
            return list(held)
        lanes = [range(odd, 16, 2) for odd in range(2)]
        return [c.shuffle(low, high, one) for low, high in zip(held[::2], held[1::2], strict=True) for one in lanes]

    def dot(
        self, c: Code, sums: list[Value], weights: Iterable[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> None:
        if len(sums) % 2:
            super().dot(c, sums, weights, x, peak)
            return
        halves = [c.shuffle(total, None, range(4 * h, 4 * h + 4)) for total in sums for h in range(2)]
        one_by_one = iter(weights)
        for g, two in enumerate(zip(one_by_one, one_by_one, strict=True)):
            rows = [c.shuffle(w, None, range(16 * h, 16 * h + 16)) for w in two for h in range(2)]
            for j in range(0, len(sums), 2):
                operand = _two_columns(c, [line[k] for k in (j, j + 1) for line in x[2 * g : 2 * g + 2]])
                for r, row in enumerate(rows):
                    name, to = "llvm.aarch64.neon.smmla.v4i32.v16i8", 2 * j + r
                    halves[to] = c.intrinsic(name, I32x4, [halves[to], row, operand])
        for j in range(len(sums)):
            sums[j] = c.concat(*halves[2 * j : 2 * j + 2])

    def dot_scaled(
        self,
        c: Code,
        sums: list[Value],
        weights: Iterable[Value],
        x: Sequence[Sequence[Value]],
        scale: Value,
        peak: int,
    ) -> None:
        part = [c.const(total.type, 0) for total in sums]
        self.dot(c, part, weights, x, peak)
        scales = [scale] if len(sums) % 2 else _in_turn(c, [scale, scale])
        for j, value in enumerate(part):
            sums[j] = sums[j] + value * scales[j % len(scales)]


def _in_turn(c: Code, vectors: Sequence[Value]) -> list[Value]:
    """Interleave the lanes of each two I32x8: one vector of their first halves and one of their second ones."""
    halves = (0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15)
    return [c.shuffle(a, b, half) for a, b in zip(vectors[::2], vectors[1::2], strict=True) for half in halves]


def _two_columns(c: Code, addresses: Sequence[Value]) -> Value:
    """Load eight bytes of each of two columns from the addresses of their groups of four."""
    (base, first), *others = [address.place() for address in addresses]
    if others == [(base, first + 4 * k) for k in range(1, 4)]:
        return c.load(_I8x16, addresses[0])
    eights = []
    for low, high in (addresses[:2], addresses[2:]):
        (base, at), after = low.place(), high.place()
        if after != (base, at + 4):
            raise ValueError("eight bytes of a column do not lie side by side")
        eights.append(c.load(_I8x8, low))
    return c.concat(*eights)


def _words(c: Code, x: Sequence[Sequence[Value]]) -> list[list[tuple[Value, int]]]:
    """Return for each address a register with the four bytes there and their lane, with one load for four adjacent
    ones.
    """
    places = {address.place(): address for line in x for address in line}
    found: dict[tuple[int, int], tuple[Value, int]] = {}
    for (base, offset), address in sorted(places.items(), key=lambda item: item[0]):
        beside = [(base, offset + 4 * k) for k in range(4)]
        if (base, offset) in found:
            continue
        if all(place in places for place in beside):
            quad = c.load(I32x4, address)
            found |= {place: (quad, k) for k, place in enumerate(beside)}
        else:
            found[base, offset] = (c.load(I32, address).splat(4), 0)
    return [[found[address.place()] for address in line] for line in x]


def _lanes(c: Code, word: tuple[Value, int], n: int) -> Value:
    """Return a vector of `n` copies of a register's lane."""
    register, number = word
    return c.shuffle(register, None, [number] * n)


NEON = Neon("neon", columns=4, needs=("neon", "dotprod"), full_u8=False, signed=True)
I8MM = I8mm("i8mm", columns=4, needs=(*NEON.needs, "i8mm"), full_u8=False, signed=True, run=8)
