"""Reading and writing f32 vectors in the element types of activations, caches and embeddings."""

from __future__ import annotations

from llamado.devices.cpu.kernels.formats import FORMATS, Small
from llamado.devices.cpu.simd import F16, F32, I8, I16, I32, Code, I8x8, I8x32, Type, Value
from llamado.gguf.types import TensorType


def load(c: Code, type_: TensorType, row: Value, index: Value, lanes: int = 8) -> Value:
    """`lanes` (8 or 1) values from element `index` of the row at `row`, as f32; eight of Q8_0 must not cross a
    block.
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
        case TensorType.Q8_0:
            block = row + index // 32 * 34
            quants = c.load(Type("i8", lanes), block + 2 + index % 32).to(f32)
            d = c.load_f16(block)
            return quants * (d if lanes == 1 else d.splat(lanes))
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


def store_q8_0_block(c: Code, to: Value, source: Value) -> None:
    """Quantises 32 f32 at `source` to a Q8_0 block: d = max|x| / 127 as f16, q = round(x / d)."""
    values = [c.load(Type("f32", 8), source + 32 * v) for v in range(4)]
    peak = c.abs(values[0])
    for v in values[1:]:
        peak = c.max(peak, c.abs(v))
    most = c.max_lanes(peak)
    inverse = c.select(most > 0.0, c.f32(127.0) / most, c.f32(0.0)).splat(8)
    c.store(to, (most / 127.0).to(F16))
    for i, v in enumerate(values):
        c.store(to + 2 + 8 * i, c.round(v * inverse).to(Type("i32", 8)).to(I8x8))


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


SCALAR = {TensorType.F32: F32, TensorType.F16: F16, TensorType.BF16: I16, TensorType.I32: I32, TensorType.I8: I8}
"""How one element of a plain type is moved without changing it."""
