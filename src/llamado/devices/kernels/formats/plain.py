"""F32, F16 and BF16: single numbers without blocks."""

from __future__ import annotations

from llamado.devices.kernels.formats.format import Plain
from llamado.devices.simd import Code, Type, Value
from llamado.gguf.types import TensorType


class F32(Plain):
    """Single precision."""

    type = TensorType.F32

    def load(self, c: Code, row: Value, index: Value, lanes: int = 8) -> Value:
        return c.load(Type("f32", lanes), row + index * 4)

    def store(self, c: Code, row: Value, index: Value, value: Value) -> None:
        c.store(row + index * 4, value)

    def expand(self, c: Code, row: Value, n: Value, to: Value) -> Value:
        return row


class F16(Plain):
    """Half precision."""

    type = TensorType.F16

    def load(self, c: Code, row: Value, index: Value, lanes: int = 8) -> Value:
        return c.load(Type("f16", lanes), row + index * 2).to(Type("f32", lanes))

    def store(self, c: Code, row: Value, index: Value, value: Value) -> None:
        c.store(row + index * 2, value.to(Type("f16", value.type.lanes)))


class BF16(Plain):
    """The upper half of a single-precision number."""

    type = TensorType.BF16

    def load(self, c: Code, row: Value, index: Value, lanes: int = 8) -> Value:
        wide = c.load(Type("i16", lanes), row + index * 2).zext(Type("i32", lanes))
        return (wide << 16).bits(Type("f32", lanes))

    def store(self, c: Code, row: Value, index: Value, value: Value) -> None:
        lanes = value.type.lanes
        bits = value.bits(Type("i32", lanes))
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 64  # NaN stays NaN
        c.store(row + index * 2, c.select(value.equals(value), rounded, quiet).to(Type("i16", lanes)))
