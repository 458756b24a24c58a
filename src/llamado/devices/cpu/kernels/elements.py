"""Reading and writing f32 vectors in the element types of activations, caches and embeddings."""

from __future__ import annotations

from llamado.devices.cpu.kernels import blocks
from llamado.devices.cpu.kernels.formats import FORMATS, Small
from llamado.devices.cpu.simd import F16, F32, I8, I16, I32, I64, Code, I8x32, Type, Value
from llamado.gguf.types import TensorType


def load(c: Code, type_: TensorType, row: Value, index: Value, lanes: int = 8) -> Value:
    """`lanes` (8 or 1) values from element `index` of the row at `row`, as f32; of blocks eight from a
    multiple of eight.
    """
    f32 = Type("f32", lanes)
    match type_:
        case TensorType.F32:
            return c.load(f32, row + index * 4)
        case TensorType.F16:
            return c.load(Type("f16", lanes), row + index * 2).to(f32)
        case TensorType.BF16:
            wide = c.load(Type("i16", lanes), row + index * 2).zext(Type("i32", lanes))
            return (wide << 16).bits(f32)
        case _ if type_ in blocks.QUANTS and lanes == 8:
            return blocks.load(c, type_, row, index)
    raise NotImplementedError(f"values of type {type_.name}")


def store(c: Code, type_: TensorType, row: Value, index: Value, value: Value) -> None:
    """Stores f32 values (8 or 1) from element `index` of a row of F32, F16 or BF16, rounded to nearest even."""
    lanes = value.type.lanes
    match type_:
        case TensorType.F32:
            c.store(row + index * 4, value)
        case TensorType.F16:
            c.store(row + index * 2, value.to(Type("f16", lanes)))
        case TensorType.BF16:
            bits = value.bits(Type("i32", lanes))
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            quiet = (bits >> 16) | 64
            c.store(row + index * 2, c.select(value.equals(value), rounded, quiet).to(Type("i16", lanes)))
        case _:
            raise NotImplementedError(f"storing values as {type_.name}")


def dequantize_block(c: Code, type_: TensorType, block: Value, to: Value) -> None:
    """Expands one block of a weight format to f32 at `to`, with ggml's order of operations."""
    form = FORMATS[type_]
    rows = [block] * 8
    zero = 0 if form.zero_shift is None else 1 << form.zero_shift
    if isinstance(form, Small):
        small = form.unpack(c, rows)
        signed = type_ == TensorType.Q8_0 and not c.lowering.full_u8
        for k, quants in enumerate(_first_row(c, small.groups, signed)):
            value = (quants - (0 if signed else zero)).to(Type("f32", 8)) * small.d
            c.store(to + 32 * k, value if small.m is None else value + small.m)
        return
    big, at = form.unpack(c, rows), 0
    mins: list[Value] = []
    if big.dmin is not None:
        for pair in big.pairs:
            both = pair.bits(Type("i32", 8))
            mins += [both & 0xFFFF, both >> 16]
        mins = [mins[i] for i in (0, 2, 1, 3, 4, 6, 5, 7)]
    for s, (groups, scale) in enumerate(big.parts):
        number = scale if scale.type.elem == "i32" else (scale.bits(Type("i32", 8)) << 16).sar(16)
        d = big.d * number.to(Type("f32", 8))
        for quants in _first_row(c, groups, False):
            value = (quants - zero).to(Type("f32", 8)) * d
            if big.dmin is not None:
                value = value - big.dmin * mins[s].to(Type("f32", 8))
            c.store(to + at, value)
            at += 32


def _first_row(c: Code, groups: list[Value], signed: bool) -> list[Value]:
    """The quants of lane 0 of all groups, in order, as I32x8 vectors."""
    wide = Type("i32", 8)
    out = []
    for g in range(0, len(groups), 2):
        eight = c.shuffle(groups[g].bits(I8x32), groups[g + 1].bits(I8x32), (0, 1, 2, 3, 32, 33, 34, 35))
        out.append(eight.to(wide) if signed else eight.zext(wide))
    return out


SCALAR = {
    TensorType.F32: F32,
    TensorType.F16: F16,
    TensorType.BF16: I16,
    TensorType.I8: I8,
    TensorType.I16: I16,
    TensorType.I32: I32,
    TensorType.I64: I64,
}
"""How one element of a plain type is moved without changing it."""
