"""Plain types as SIMD types, for moving elements without conversion."""

from __future__ import annotations

from llamado.devices.simd import F16, F32, I8, I16, I32, I64
from llamado.gguf.types import TensorType

SCALAR = {
    TensorType.F32: F32,
    TensorType.F16: F16,
    TensorType.BF16: I16,
    TensorType.I8: I8,
    TensorType.I16: I16,
    TensorType.I32: I32,
    TensorType.I64: I64,
}
