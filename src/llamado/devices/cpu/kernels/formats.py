"""Quantised weight formats as the matmul kernels see them: eight rows of a block at once, straight from the file's
layout.

Sources of the layouts: ggml-common.h (`block_q4_0` … `block_q6_K`) and the dequantisation in ggml-quants.c. A row's
block is read as 4-byte cells and transposed with its seven neighbours, so that lane r of every vector belongs to row
r and a vector holds four consecutive weights of eight rows ("a group"). A weight of zero point z is held as the
unsigned byte w + z; z times the sum of the activations is taken off in integers, so nothing is lost.

Two families by the activation format they multiply with (`activations.py`): blocks of 32 weights with float scales, and
super-blocks of 256 with integer scales for their 8 or 16 sub-blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from llamado.devices.cpu.simd import I16, I32, Code, F16x8, F32x8, I8x32, I16x8, I16x16, I32x4, I32x8, Value
from llamado.gguf.types import TensorType


@dataclass
class Block32:
    """Eight rows of one 32-weight block: Σ over the block is d·Σ(w·x) + m·Σx."""

    groups: list[Value]
    d: Value
    m: Value | None = None


@dataclass
class Block256:
    """Eight rows of one super-block: d·(Σ_s scale_s·Σ(w·x) − zero·Σ_s scale_s·Σx) − dmin·Σ_s min_s·Σx."""

    d: Value
    dmin: Value | None
    pairs: list[Value]  # I16x16: mins (or scales where the zero point needs them) of two sub-blocks per row
    parts: Iterator[tuple[list[Value], Value]] = field(default_factory=lambda: iter(()))  # groups and scale, in order


@dataclass(frozen=True)
class Format:
    """A weight format: bytes of a block, greatest unsigned weight, zero point as a power of two (None: 0)."""

    type: TensorType
    peak: int
    zero_shift: int | None = None

    @property
    def block(self) -> int:
        return self.type.block_size

    @property
    def block_bytes(self) -> int:
        return self.type.block_bytes


def _halves(c: Code, rows: Sequence[Value], offset: int) -> Value:
    """The f16 at `offset` of each row as F32x8."""
    return c.gather(I16, [row + offset for row in rows]).bits(F16x8).to(F32x8)


def _low_half(v: Value) -> Value:
    """f16 in the low half of each I32 lane → F32x8."""
    return v.to(I16x8).bits(F16x8).to(F32x8)


def _nibbles(c: Code, cells: Sequence[Value]) -> list[Value]:
    """Transposed cells of packed nibbles → the groups of all low nibbles, then of all high ones."""
    raw = [v.bits(I8x32) for v in cells]
    return [v & 15 for v in raw] + [_shift_bytes(v, 4) & 15 for v in raw]


def _shift_bytes(v: Value, n: int) -> Value:
    """Bytes shifted right by n with the neighbour's bits coming in above: mask what you need."""
    return (v.bits(I16x16) >> n).bits(I8x32)


def _fifth_bits(c: Code, qh: Value, group: int) -> Value:
    """Bits 4·group … 4·group+3 of each row's 32-bit `qh` as 16 or 0 in the four bytes of its lane."""
    byte = group // 2
    spread = c.shuffle(qh.bits(I8x32), None, [4 * lane + byte for lane in range(8) for _ in range(4)])
    bits = c.const(I8x32, [1 << (4 * (group % 2) + k) for _ in range(8) for k in range(4)])
    chosen = (spread & bits).equals(bits)
    return c.select(chosen, c.const(I8x32, 16), c.const(I8x32, 0))


class Small(Format):
    """A format of 32-weight blocks."""

    def unpack(self, c: Code, rows: Sequence[Value]) -> Block32:
        """Reads the block at each row address."""
        match self.type:
            case TensorType.Q4_0:
                return Block32(_nibbles(c, self._cells(c, rows, 2)), _halves(c, rows, 0))
            case TensorType.Q4_1:
                both = c.gather(I32, rows)
                return Block32(_nibbles(c, self._cells(c, rows, 4)), _low_half(both), _low_half(both >> 16))
            case TensorType.Q5_0:
                qh = c.gather(I32, [row + 2 for row in rows])
                return Block32(self._five(c, rows, 6, qh), _halves(c, rows, 0))
            case TensorType.Q5_1:
                both, qh = c.gather(I32, rows), c.gather(I32, [row + 4 for row in rows])
                return Block32(self._five(c, rows, 8, qh), _low_half(both), _low_half(both >> 16))
            case _:
                cells = c.transpose8([c.load(I32x8, row + 2) for row in rows])
                groups = [v.bits(I8x32) for v in cells]
                if c.lowering.full_u8:
                    groups = [v ^ -128 for v in groups]
                return Block32(groups, _halves(c, rows, 0))

    def _cells(self, c: Code, rows: Sequence[Value], offset: int) -> list[Value]:
        return c.transpose8x4([c.load(I32x4, row + offset) for row in rows])

    def _five(self, c: Code, rows: Sequence[Value], offset: int, qh: Value) -> list[Value]:
        groups = _nibbles(c, self._cells(c, rows, offset))
        return [v | _fifth_bits(c, qh, g) for g, v in enumerate(groups)]


class Super(Format):
    """A format of 256-weight super-blocks."""

    @property
    def part(self) -> int:
        """Weights per sub-block."""
        return 16 if self.type == TensorType.Q6_K else 32

    @property
    def n_pairs(self) -> int:
        return 8 if self.type == TensorType.Q6_K else 4

    def unpack(self, c: Code, rows: Sequence[Value]) -> Block256:
        """Reads the super-block at each row address."""
        return self._q6(c, rows) if self.type == TensorType.Q6_K else self._q45(c, rows)

    def _q45(self, c: Code, rows: Sequence[Value]) -> Block256:
        head = c.transpose8x4([c.load(I32x4, row) for row in rows])
        u0, u1, u2 = head[1:]
        scales = [u0 & 0x3F3F3F3F, (u2 & 0x0F0F0F0F) | (((u0 >> 6) & 0x03030303) << 4)]
        mins = [u1 & 0x3F3F3F3F, ((u2 >> 4) & 0x0F0F0F0F) | (((u1 >> 6) & 0x03030303) << 4)]
        pairs = [(v >> shift & 0x00FF00FF).bits(I16x16) for v in mins for shift in (0, 8)]
        five = self.type == TensorType.Q5_K

        def parts() -> Iterator[tuple[list[Value], Value]]:
            high = c.transpose8([c.load(I32x8, row + 16) for row in rows]) if five else []
            for j in range(4):
                cells = c.transpose8([c.load(I32x8, row + (48 if five else 16) + 32 * j) for row in rows])
                groups = _nibbles(c, cells)
                for half in range(2):
                    s = 2 * j + half
                    scale = (scales[s // 4] >> (8 * (s % 4))) & 0xFF
                    chosen = groups[8 * half : 8 * half + 8]
                    if five:
                        bits = [_place_bit(c, v.bits(I8x32), s, 4) for v in high]
                        chosen = [v | b for v, b in zip(chosen, bits, strict=True)]
                    yield chosen, c.lowering.scale(c, scale)

        return Block256(_low_half(head[0]), _low_half(head[0] >> 16), pairs, parts())

    def _q6(self, c: Code, rows: Sequence[Value]) -> Block256:
        scales = c.transpose8x4([c.load(I32x4, row + 192) for row in rows])
        pairs: list[Value] = []
        for v in scales:
            words = v.bits(I16x16)
            pairs += [(words << 8).sar(8), words.sar(8)]

        def parts() -> Iterator[tuple[list[Value], Value]]:
            for half in range(2):
                low = [c.transpose8([c.load(I32x8, row + 64 * half + 32 * k) for row in rows]) for k in range(2)]
                high = c.transpose8([c.load(I32x8, row + 128 + 32 * half) for row in rows])
                for quarter in range(4):
                    groups = []
                    for g in range(8):
                        nibble = _shift_bytes(low[quarter % 2][g].bits(I8x32), 4 * (quarter // 2)) & 15
                        two = high[g].bits(I8x32)
                        shifted = _shift_bytes(two, 2 * quarter - 4) if quarter > 2 else two
                        if quarter < 2:
                            shifted = (two.bits(I16x16) << (4 - 2 * quarter)).bits(I8x32)
                        groups.append(nibble | (shifted & 0x30))
                    for k in range(2):
                        s = 8 * half + 2 * quarter + k
                        scale = (scales[s // 4] << (24 - 8 * (s % 4))).sar(24)
                        yield groups[4 * k : 4 * k + 4], c.lowering.scale(c, scale)

        return Block256(_halves(c, rows, 208), None, pairs, parts())


def _place_bit(c: Code, v: Value, source: int, target: int) -> Value:
    """Bit `source` of each byte at bit `target`, all other bits clear."""
    words = v.bits(I16x16)
    moved = words << (target - source) if target >= source else words >> (source - target)
    return moved.bits(I8x32) & (1 << target)


FORMATS: dict[TensorType, Small | Super] = {
    TensorType.Q4_0: Small(TensorType.Q4_0, peak=15, zero_shift=3),
    TensorType.Q4_1: Small(TensorType.Q4_1, peak=15),
    TensorType.Q5_0: Small(TensorType.Q5_0, peak=31, zero_shift=4),
    TensorType.Q5_1: Small(TensorType.Q5_1, peak=31),
    TensorType.Q8_0: Small(TensorType.Q8_0, peak=255, zero_shift=7),
    TensorType.Q4_K: Super(TensorType.Q4_K, peak=15),
    TensorType.Q5_K: Super(TensorType.Q5_K, peak=31),
    TensorType.Q6_K: Super(TensorType.Q6_K, peak=63, zero_shift=5),
}
