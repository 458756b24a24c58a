"""MXFP4: a byte with the exponent of d | 16 bytes of nibbles; d · value of the nibble.
NVFP4: 4 bytes of d, one per 16 weights | 32 bytes of nibbles, 8 for each of them; d · value of the nibble.

Nibbles are E2M1 numbers; the table has their doubles, which are integers, and d is halved in return. MXFP4's d is E8M0
(a power of two), NVFP4's UE4M3 (no sign, four bits of exponent, three of mantissa). Source: `ggml_e8m0_to_fp32_half`
and `ggml_ue4m3_to_fp32` in ggml-impl.h.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llamado.devices.kernels.formats import bits
from llamado.devices.kernels.formats.format import Block32, Blocks, Blocks32
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import I8, I32, Code, Type, Value
from llamado.gguf.types import TensorType

_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class MXFP4(Blocks32):
    """Four-bit floats with a power of two as scale of 32 of them."""

    type = TensorType.MXFP4
    peak, zero_shift, of_table = 28, 4, True

    def unpack(self, c: Code, panel: Panel) -> Iterable[Block32]:
        exponent = panel.gather(I8, 0).zext(Type("i32", panel.n))
        small = c.const(exponent.type, 0x00200000) << exponent  # 2^-128 and 2^-127 are denormal
        d = c.select(exponent < 2, small, (exponent - 1) << 23).as_lanes("f32")
        return [Block32(_weights(c, self, bits.nibbles(panel.cells(1, 4))), d)]


class NVFP4(Blocks32):
    """Four-bit floats with a small float as scale of 16 of them."""

    type = TensorType.NVFP4
    peak, zero_shift, has_halves, of_table = 28, 4, True, True

    def unpack(self, c: Code, panel: Panel) -> Iterable[Block32]:
        scales = panel.gather(I32, 0)
        for part in range(2):
            d, d_high = (_ue4m3(c, (scales >> 8 * (2 * part + k)) & 0xFF) for k in range(2))
            cells = panel.cells(4 + 16 * part, 4)
            groups = _weights(c, self, bits.nibbles(cells[:2]) + bits.nibbles(cells[2:]))
            yield Block32(groups, d, d_high=d_high)


def _weights(c: Code, form: Blocks, numbers: Sequence[Value]) -> list[Value]:
    """Groups of the values of nibbles."""
    table = [v + form.zero(c.lowering) for v in _TABLE]
    return [c.lowering.lookup(c, table, number) for number in numbers]


def _ue4m3(c: Code, code: Value) -> Value:
    """Half of the value of eight bits; 0 for 0x7F."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = ((exponent + (127 - 8)) << 23 | mantissa << 20).as_lanes("f32")
    value = c.select(exponent.equals(0), mantissa.cast("f32") * 2.0**-10, normal)
    return c.select(code.equals(0x7F), c.const(value.type, 0.0), value)
