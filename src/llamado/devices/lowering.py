"""Operations of the SIMD language that instruction sets implement differently: integer dot products.

The base class uses plain LLVM arithmetic, which every processor has. All lowerings return the same integers, and so the
same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llamado.devices.simd import I8, I32, Code, Type, Value

_I32x16 = Type("i32", 16)


@dataclass(frozen=True)
class Lowering:
    """One implementation of `LoweringInterface`. `columns`: the widest column group that matmul keeps in registers."""

    name: str
    columns: int

    needs: tuple[str, ...] = ()
    """Features that a processor must have, in LLVM's names."""

    without: tuple[str, ...] = ()
    """Prefixes of features that code is compiled without, so that it matches processors that lack them."""

    # Rows that products of several columns unpack together: the lanes of their vectors.
    panel_rows: int = 8

    # Groups of columns that a product of few columns takes at once.
    groups: int = 1

    # Most passes of such a product over rows it unpacked together; with more passes it goes through scratch.
    passes: int = 1

    # Bytes of a column of activations that are adjacent in a group of columns.
    run: int = 4

    # True if products take every column of activations apart, in units; otherwise most take groups of columns.
    units: bool = False

    # True if products of many columns have tile registers (`kernels/tiles/`).
    tiles: bool = False

    # A weight of zero point z is held as u = w + z, unsigned. Weights that need all of u8, which AVX2's saturating
    # multiply does not allow, stay signed there.
    full_u8: bool = True

    # True if products take signed weights at no cost: then products of many columns take them without zero point.
    signed: bool = False

    @property
    def few(self) -> int:
        """Most columns for which rows of weights pass through registers instead of scratch."""
        return self.columns * self.groups

    def rows_of_panel(self, n_rows: int) -> int:
        """Rows that are unpacked together, for a matrix of `n_rows` rows."""
        return self.panel_rows if n_rows >= self.panel_rows else 8

    def arrange(self, c: Code, groups: Sequence[Value], columns: int) -> list[Value]:
        """Arrange an even number of groups of weights as `dot` takes them for that many columns."""
        return list(groups)

    def hold(self, c: Code, sums: Sequence[Value]) -> list[Value]:
        """Convert integer sums (I32x8, one for each column) to the layout that `dot` adds to."""
        return list(sums)

    def release(self, c: Code, held: Sequence[Value]) -> list[Value]:
        """Convert the result of `hold` back to one vector for each column."""
        return list(held)

    def dot(
        self, c: Code, sums: list[Value], weights: Iterable[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> None:
        """sums[j] (I32x8, held) += Σ_g groups of four of weights[g] (arranged) · x[g][j] (address of 4 signed bytes).

        Weights are unsigned bytes ≤ `peak`. They are signed if `peak` is greater than 127 without `full_u8`, and if
        products take `signed` ones.
        """
        for w, addresses in zip(weights, x, strict=True):
            words = w.bits(sums[0].type)
            for k in range(4):
                number = (words >> (8 * k)) & 0xFF
                for j, address in enumerate(addresses):
                    operand = c.load(I8, address + k).to(I32).splat(number.type.lanes)
                    sums[j] = sums[j] + number * operand

    def dot_scaled(
        self,
        c: Code,
        sums: list[Value],
        weights: Iterable[Value],
        x: Sequence[Sequence[Value]],
        scale: Value,
        peak: int,
    ) -> None:
        """sums[j] += scale · (the dot product of `dot`), `scale` as made by `scale`."""
        part = [c.const(total.type, 0) for total in sums]
        self.dot(c, part, weights, x, peak)
        for j, value in enumerate(part):
            sums[j] = sums[j] + value * scale

    def dot_pairs(self, c: Code, pairs: Sequence[Value], x: Sequence[Sequence[Value]], j: int) -> Value:
        """Σ_p the sums of neighboring products of pairs[p] (I16x16) with the two i16 at x[p][j], as I32x8."""
        total = c.const(pairs[0].type._replace(elem="i32", lanes=pairs[0].type.lanes // 2), 0)
        for pair, addresses in zip(pairs, x, strict=True):
            total = self._add_pairs(c, total, pair, c.splat_load(total.type, addresses[j]).bits(pair.type))
        return total

    def _add_pairs(self, c: Code, total: Value, a: Value, b: Value) -> Value:
        wide = a.to(_I32x16) * b.to(_I32x16)
        even, odd = c.shuffle(wide, None, range(0, 16, 2)), c.shuffle(wide, None, range(1, 16, 2))
        return total + even + odd

    def scale(self, c: Code, value: Value) -> Value:
        """Prepare an I32x8 of small integers (−128 … 127) as the scale of `dot_scaled`."""
        return value

    def lookup(self, c: Code, table: Sequence[int], numbers: Value) -> Value:
        """table[number] for each byte of `numbers` (0 … 15)."""
        row = [c.const(numbers.type, v) for v in table]
        for bit in range(4):
            odd = (numbers & (1 << bit)).differs(0)
            row = [c.select(odd, row[i + 1], row[i]) for i in range(0, len(row), 2)]
        return row[0]

    def features(self, host: Mapping[str, bool]) -> dict[str, bool]:
        """Return the processor's features that code is compiled for."""
        return {name: on and not name.startswith(self.without) for name, on in host.items()}


PORTABLE = Lowering("portable", columns=4)
