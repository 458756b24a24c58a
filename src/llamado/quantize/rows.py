"""Conversion of weight rows between types: every writable type, and every readable one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import numpy as np

from llamado.devices.kernel import kernel
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.simd import Code, Work
from llamado.gguf.types import TensorType as T
from llamado.quantize.errors import QuantizeError
from llamado.quantize.types import fp4, iq1, iq2, iq3, iq4, k_quants, legacy, plain, simple, ternary
from llamado.quantize.types.arithmetic import Bytes, Floats
from llamado.quantize.types.search import call

Quantizer = Callable[[Floats, "Floats | None"], Bytes]
"""Function of rows float32[n, row] and optional column importance float32[row]; returns uint8[blocks, block_bytes]."""

QUANTIZERS: Mapping[T, Quantizer] = {
    T[name.upper()]: getattr(family, name)
    for family, names in (
        (plain, "f32 f16 bf16"),
        (legacy, "q8_0 q4_0 q4_1 q5_0 q5_1 q1_0 q2_0"),
        (k_quants, "q2_k q3_k q4_k q5_k q6_k"),
        (iq4, "iq4_nl iq4_xs"),
        (iq1, "iq1_s iq1_m"),
        (iq2, "iq2_xxs iq2_xs iq2_s"),
        (iq3, "iq3_xxs iq3_s"),
        (ternary, "tq1_0 tq2_0"),
        (fp4, "mxfp4 nvfp4"),
    )
    for name in names.split()
}


def quantize(x: Floats, type_: T, weights: Floats | None = None) -> Bytes:
    """Quantize rows float32[n, row] to uint8[n, row_bytes]; a row must be a whole number of blocks.

    `weights`, float32[row]: the importance of each column. Raises QuantizeError if the type cannot be written.
    """
    quantizer = QUANTIZERS.get(type_)
    if quantizer is None:
        raise QuantizeError(f"{type_.name} is not a supported target type")
    return quantizer(x, weights).reshape(len(x), -1)


@kernel("x", "y", "n", "row_bytes", "rows")
def expand(c: Code, a: SimpleNamespace, work: Work, *, source: str) -> None:
    """Kernel: y = rows of `n` weights as f32."""
    with c.range(0, a.rows) as row:
        FORMATS[T[source]].expand(c, a.x + row * a.row_bytes, a.n, a.y + row * a.n * 4)


def is_readable(type_: T) -> bool:
    """Return True if rows of this type can be converted to floats."""
    return type_ in FORMATS


def floats(rows: Bytes, type_: T, n: int) -> Floats:
    """Convert rows uint8[rows, row_bytes] to float32[rows, n]."""
    if type_ is T.F32:
        return rows.view(np.float32).reshape(len(rows), n)
    y = np.empty((len(rows), n), np.float32)
    x = np.ascontiguousarray(rows)
    call(expand, {"x": x, "y": y, "n": n, "row_bytes": x.shape[1], "rows": len(x)}, source=type_.name)
    return y


def is_rounded(source: T, target: T, weights: Floats | None) -> bool:
    """Return True if `convert` quantizes directly from the file's rows, without floats in memory."""
    return simple.supports(source, target) and (weights is None or target is T.Q8_0)


def convert(rows: Bytes, source: T, n: int, target: T, weights: Floats | None) -> Bytes | None:
    """Convert rows uint8[rows, row_bytes] of `n` weights; return None if the result is not finite."""
    if is_rounded(source, target, weights):
        found, is_finite = simple.quantize_rows(rows, source, n, target)
        return found if is_finite else None
    x = floats(rows, source, n)
    if not np.isfinite(x).all():
        return None
    found = quantize(x, target, weights)
    return None if target is T.F16 and not np.isfinite(found.view(np.float16)).all() else found
