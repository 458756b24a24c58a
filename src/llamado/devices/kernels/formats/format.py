"""Interface of a number format: converting rows to and from f32, and unpacking weights for products.

Every format is one class in one file of this folder, and one entry of the registry (`__init__.py`). A class implements
what its type supports:

- `load` (and `expand`): rows to f32: tables, caches, masks, weights of plain numbers;
- `store_block` or `store`: rows from f32: caches;
- `unpack` (`Blocks32`, `Blocks256`): products with weights in the layout of the file (`matmul.py`).

Sources of the layouts: ggml-common.h (`block_q4_0` … `block_q6_K`) and the dequantization in ggml-quants.c.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from llamado.devices.kernels.activations import BYTES_PER_COLUMN
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import Code, F32x8, I32x8, LoweringInterface, Value
from llamado.gguf.types import TensorType


class Format(ABC):
    """A number format: rows of whole blocks, `block` numbers in `block_bytes` bytes."""

    type: ClassVar[TensorType]
    writable: ClassVar[bool] = False
    """True if rows of f32 can be stored in it."""
    cached: ClassVar[bool] = False
    """True if attention reads keys and values of it in place (`load`)."""

    @property
    def block(self) -> int:
        return self.type.block_size

    @property
    def block_bytes(self) -> int:
        return self.type.block_bytes

    def load(self, c: Code, row: Value, index: Value, lanes: int = 8) -> Value:
        """Load `lanes` (8 or 1) values from element `index` of the row at `row`, as f32. Block formats load eight from
        a multiple of eight.
        """
        raise NotImplementedError(f"values of type {self.type.name}")

    @abstractmethod
    def expand(self, c: Code, row: Value, n: Value, to: Value) -> Value:
        """Return the address of the `n` values of the row at `row` as f32. They are stored at `to` unless they are f32
        already. A team sees them after `join`.
        """


class Plain(Format):
    """Formats of single numbers."""

    writable = cached = True

    @abstractmethod
    def store(self, c: Code, row: Value, index: Value, value: Value) -> None:
        """Store f32 values (8 or 1) from element `index` of a row, rounded to nearest even."""

    def expand(self, c: Code, row: Value, n: Value, to: Value) -> Value:
        n8 = n // 8 * 8
        for lanes, start, stop in ((8, c.i64(0), n8), (1, n8, n)):
            with c.several(start, stop, lanes) as turns:
                values = [self.load(c, row, turn.at, lanes) for turn in turns]
                for (j, guard), value in zip(turns, values, strict=True):
                    with guard:
                        c.store(to + j * 4, value)
        return to


class Cached32(Format):
    """Block formats of caches: load eight of 32 numbers as f32, and store a whole block of 32 f32.

    Rounding is that of the reference quantization in ggml-quants.c.
    """

    writable = cached = True
    numbers: ClassVar[int]
    """Offset of the numbers in a block, after its scales."""

    def load(self, c: Code, row: Value, index: Value, lanes: int = 8) -> Value:
        if lanes != 8:
            raise NotImplementedError(f"single values of type {self.type.name}")
        return self.load_eight(c, row + index // 32 * self.block_bytes, index % 32)

    def expand(self, c: Code, row: Value, n: Value, to: Value) -> Value:
        with c.each(0, n // 8 * 8, 8) as j:
            c.store(to + j * 4, self.load(c, row, j))
        return to

    @abstractmethod
    def load_eight(self, c: Code, block: Value, inside: Value) -> Value:
        """Load the eight values of a block from number `inside` on, as F32x8."""

    @abstractmethod
    def store_block(self, c: Code, to: Value, source: Value) -> None:
        """Quantize the 32 f32 at `source` to one block."""

    def store_row(self, c: Code, row: Value, n: Value, source: Value) -> None:
        """Quantize the `n` f32 at `source` to the row at `row`."""
        with c.each(0, n // 32) as b:
            self.store_block(c, row + b * self.block_bytes, source + b * 128)


# --- weights that are multiplied in blocks ----------------------------------------------------------------------------


@dataclass
class Block32:
    """Eight rows of 32 weights: Σ over them is d·Σ(w·x) + m·Σx.

    `d_high`: d of the last sixteen, if it differs.
    """

    groups: list[Value]
    d: Value
    m: Value | None = None
    d_high: Value | None = None


@dataclass
class Block256:
    """Eight rows of one super-block: d·(Σ_s scale_s·Σ(w·x) − zero·Σ_s scale_s·Σx) − dmin·Σ_s min_s·Σx."""

    d: Value
    dmin: Value | None
    pairs: list[Value]  # I16x16: mins (or scales if the zero point needs them) of two sub-blocks per row
    parts: Iterable[tuple[list[Value], Value | None]] = ()  # groups and scale, in order


class Blocks(Format):
    """Weights that products take in blocks: eight rows of a block at once, straight from the file's layout.

    A row's block is read as 4-byte cells, so that lane r of every vector belongs to row r and a vector holds four
    consecutive weights of each row ("a group"). A weight of zero point z is
    held as the unsigned byte w + z; z times the sum of the activations is subtracted in integers, so nothing is lost.

    There are two families, by the activations they multiply with (`activations.py`): blocks of 32 weights, or several
    times 32, with float scales, and super-blocks of 256 with integer scales for their 8 or 16 sub-blocks.
    """

    columns: ClassVar[int]
    """Values in a block of the quantized activations it is multiplied with."""
    peak: ClassVar[int]
    """The largest weight, unsigned."""
    zero_shift: ClassVar[int | None] = None
    """The zero point as a power of two; None: 0."""
    of_table: ClassVar[bool] = False
    """True if weights are looked up in a table, which may have signed ones at no cost."""
    has_min: ClassVar[bool] = False
    """True if a block has a minimum of its own, which is added (or subtracted) once for all its weights."""

    @property
    def column_bytes(self) -> int:
        """Bytes of a column of activations for one block of weights."""
        return self.block // self.columns * BYTES_PER_COLUMN[self.columns]

    def signed(self, lowering: LoweringInterface) -> bool:
        """Return True if groups hold signed weights: unsigned ones would need more bits than the lowering's products
        support, or signed ones cost nothing.
        """
        return (self.peak > 127 and not lowering.full_u8) or (self.of_table and lowering.signed)

    def zero(self, lowering: LoweringInterface) -> int:
        """The zero point of the weights in groups."""
        return 0 if self.zero_shift is None or self.signed(lowering) else 1 << self.zero_shift

    def expand(self, c: Code, row: Value, n: Value, to: Value) -> Value:
        """Uses ggml's order of operations."""
        with c.each(0, n // self.block) as b:
            self.expand_block(c, row + b * self.block_bytes, to + b * (4 * self.block))
        return to

    @abstractmethod
    def expand_block(self, c: Code, block: Value, to: Value) -> None:
        """Store one block as f32."""

    def _first_row(self, c: Code, groups: Sequence[Value]) -> list[Value]:
        """Lane 0 of all groups, in order, as I32x8 vectors."""
        signed = self.signed(c.lowering)
        out = []
        for g in range(0, len(groups), 2):
            eight = c.shuffle(groups[g].as_lanes("i8"), groups[g + 1].as_lanes("i8"), (0, 1, 2, 3, 32, 33, 34, 35))
            out.append(eight.to(I32x8) if signed else eight.zext(I32x8))
        return out


class Blocks32(Blocks):
    """Weights in blocks of 32, or of several times 32."""

    columns = 32
    has_halves: ClassVar[bool] = False
    """True if the last sixteen of 32 weights have a scale of their own (`Block32.d_high`)."""

    @property
    def n_parts(self) -> int:
        """Number of times 32 weights in a block."""
        return self.block // 32

    @abstractmethod
    def unpack(self, c: Code, panel: Panel) -> Iterable[Block32]:
        """Read the block of each row, 32 weights at a time."""

    def expand_block(self, c: Code, block: Value, to: Value) -> None:
        zero, at = self.zero(c.lowering), 0
        for small in self.unpack(c, Panel(c, [block] * 8, self.block_bytes)):
            for k, quants in enumerate(self._first_row(c, small.groups)):
                d = small.d if k < 2 or small.d_high is None else small.d_high
                value = (quants - zero).to(F32x8) * d
                c.store(to + at, value if small.m is None else value + small.m)
                at += 32


class Blocks256(Blocks):
    """Weights in super-blocks of 256."""

    columns = 256
    part: ClassVar[int] = 32
    """Weights per sub-block."""
    has_scales: ClassVar[bool] = True
    """True if sub-blocks have scales; otherwise those of `Block256.parts` are None."""

    @property
    def n_parts(self) -> int:
        return 256 // self.part

    @property
    def n_pairs(self) -> int:
        return self.n_parts // 2

    @abstractmethod
    def unpack(self, c: Code, panel: Panel) -> Block256:
        """Read the super-block of each row."""

    def expand_block(self, c: Code, block: Value, to: Value) -> None:
        big, zero, at = self.unpack(c, Panel(c, [block] * 8, self.block_bytes)), self.zero(c.lowering), 0
        mins: list[Value] = []
        if big.dmin is not None:
            for pair in big.pairs:
                both = pair.bits(I32x8)
                mins += [both & 0xFFFF, both >> 16]
            mins = [mins[four + i] for four in range(0, self.n_parts, 4) for i in (0, 2, 1, 3)]
        for s, (groups, scale) in enumerate(big.parts):
            d = big.d
            if scale is not None:
                number = scale if scale.type == I32x8 else (scale.bits(I32x8) << 16).sar(16)
                d = big.d * number.to(F32x8)
            for quants in self._first_row(c, groups):
                value = (quants - zero).to(F32x8) * d
                if big.dmin is not None:
                    value = value - big.dmin * mins[s].to(F32x8)
                c.store(to + at, value)
                at += 32
