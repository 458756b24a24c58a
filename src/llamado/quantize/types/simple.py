"""Q8_0, Q4_0, Q4_1, Q5_0, Q5_1: blocks of 32 with a scale and optional minimum, quantized directly from a file's rows.

Scales follow from the extremes of a block, and every weight is rounded once (the reference quantization of
ggml-quants.c). The weights of a block are read once and stay in registers until its bytes are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from llamado.devices.kernel import kernel
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.kernels.formats.format import Plain
from llamado.devices.simd import F16, F32, I32, I64, Code, F32x8, I8x8, I32x8, Type, Value, Work
from llamado.gguf.types import TensorType as T
from llamado.quantize.types.arithmetic import Bytes
from llamado.quantize.types.search import call

_HALF = float(np.nextafter(np.float32(0.5), np.float32(0)))
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000


class SourceBlock(NamedTuple):
    """32 weights of a row from number `start` on: eight in each of `values`; `peak`: bits of the largest magnitude."""

    form: Plain
    row: Value
    start: Value
    values: Sequence[Value]
    peak: Value

    def first(self, c: Code, chosen: Sequence[Value]) -> Value:
        """Return the first of the chosen weights, with its sign."""
        place = c.intrinsic("llvm.cttz.i32", I32, [_together(c, chosen).bits(I32), c.const(Type("i1"), 0)])
        return self.form.load(c, self.row, self.start + (place & 31).to(I64), 1)


def _together(c: Code, parts: Sequence[Value]) -> Value:
    """Concatenate four vectors of eight lanes."""
    return c.concat(c.concat(parts[0], parts[1]), c.concat(parts[2], parts[3]))


def _inverse(c: Code, d: Value) -> Value:
    """Return 1 / d, or 0 if d is 0, in eight lanes."""
    return c.select(d.differs(0.0), c.f32(1.0) / d, c.f32(0.0)).splat(8)


def _truncate(c: Code, numbers: Sequence[Value]) -> Value:
    """Truncate numbers to bytes."""
    return _together(c, [v.to(I32x8).to(I8x8) for v in numbers])


def _store_nibbles(c: Code, to: Value, levels: Value) -> None:
    """Store 32 levels in 16 bytes: the first half in the low nibbles, the second in the high ones."""
    low, high = (c.shuffle(levels, None, range(at, at + 16)) for at in (0, 16))
    c.store(to, (low & 15) | (high << 4))


def _store_fives(c: Code, to: Value, levels: Value) -> None:
    """Store the fifth bits of 32 levels in four bytes, then their nibbles."""
    c.store(to, (levels & 16).differs(0).bits(I32))
    _store_nibbles(c, to + 4, levels)


def _around_zero(c: Code, block: SourceBlock, to: Value, zero: int) -> Value:
    """Store d = the first largest weight / −zero as a half; return the levels x / d + zero, at most 2·zero − 1."""
    peak = block.peak.splat(8)
    d = block.first(c, [(v.bits(I32x8) & _MAGNITUDE).equals(peak) for v in block.values]) / -float(zero)
    c.store(to, d.to(F16))
    by = _inverse(c, d)
    return c.min(_truncate(c, [v * by + (zero + 0.5) for v in block.values]), 2 * zero - 1)


def _from_least(c: Code, block: SourceBlock, to: Value, top: int) -> Value:
    """Store d = (max − min) / top and the min as halves; return the levels (x − min) / d, at most `top`."""
    least = most = block.values[0]
    for v in block.values[1:]:
        least, most = c.min(least, v), c.max(most, v)
    # 0 and −0 are equal: use the first of them.
    low, high = (
        block.first(c, [v.equals(bound.splat(8)) for v in block.values])
        for bound in (-c.max_lanes(-least), c.max_lanes(most))
    )
    d = (high - low) / float(top)
    c.store(to, d.to(F16))
    c.store(to + 2, low.to(F16))
    by = _inverse(c, d)
    return c.min(_truncate(c, [(v - low.splat(8)) * by + 0.5 for v in block.values]), top)


def _q8_0(c: Code, block: SourceBlock, to: Value) -> None:
    d = block.peak.bits(F32) / 127.0
    c.store(to, d.to(F16))
    by = _inverse(c, d)

    def away(v: Value) -> Value:
        """Return v such that truncation rounds to the nearest integer, halves away from zero."""
        sign = v.bits(I32x8) & ~_MAGNITUDE
        return v + (c.const(F32x8, _HALF).bits(I32x8) | sign).bits(F32x8)

    c.store(to + 2, _truncate(c, [away(v * by) for v in block.values]))


def _q4_0(c: Code, block: SourceBlock, to: Value) -> None:
    _store_nibbles(c, to + 2, _around_zero(c, block, to, 8))


def _q5_0(c: Code, block: SourceBlock, to: Value) -> None:
    _store_fives(c, to + 2, _around_zero(c, block, to, 16))


def _q4_1(c: Code, block: SourceBlock, to: Value) -> None:
    _store_nibbles(c, to + 4, _from_least(c, block, to, 15))


def _q5_1(c: Code, block: SourceBlock, to: Value) -> None:
    _store_fives(c, to + 4, _from_least(c, block, to, 31))


WRITERS: Mapping[T, Callable[[Code, SourceBlock, Value], None]] = {
    T.Q8_0: _q8_0,
    T.Q4_0: _q4_0,
    T.Q4_1: _q4_1,
    T.Q5_0: _q5_0,
    T.Q5_1: _q5_1,
}
"""Block writer of each type."""


@kernel("x", "y", "n", "row_bytes", "out_bytes", "rows", "peak")
def round_rows(c: Code, a: SimpleNamespace, work: Work, *, source: str, target: str) -> None:
    """Kernel: y = rows of `n` weights in the target's blocks; `peak`: bits of the largest magnitudes, in 8 lanes."""
    form, size = FORMATS[T[source]], T[target].block_bytes
    assert isinstance(form, Plain)
    worst = c.var(c.const(I32x8, 0))
    with c.range(0, a.rows) as i:
        row, out = a.x + i * a.row_bytes, a.y + i * a.out_bytes
        with c.range(0, a.n // 32) as b:
            index = b * 32
            values = [form.load(c, row, index + 8 * k) for k in range(4)]
            peaks = [v.bits(I32x8) & _MAGNITUDE for v in values]
            peak = c.max(c.max(peaks[0], peaks[1]), c.max(peaks[2], peaks[3]))
            worst.value = c.max(worst.value, peak)
            WRITERS[T[target]](c, SourceBlock(form, row, index, values, c.max_lanes(peak)), out + b * size)
    c.store(a.peak, worst.value)


def supports(source: T, target: T) -> bool:
    """Return True if this module can convert `source` to `target`."""
    return target in WRITERS and isinstance(FORMATS.get(source), Plain)


def quantize_rows(rows: Bytes, source: T, n: int, target: T) -> tuple[Bytes, bool]:
    """Quantize rows uint8[rows, row_bytes] of `n` weights to uint8[rows, bytes].

    The second result is True if all weights are finite.
    """
    out = np.empty((len(rows), target.row_bytes(n)), np.uint8)
    x, peak = np.ascontiguousarray(rows), np.zeros(8, np.int32)
    call(
        round_rows,
        {"x": x, "y": out, "n": n, "row_bytes": x.shape[1], "out_bytes": out.shape[1], "rows": len(x), "peak": peak},
        source=source.name,
        target=target.name,
    )
    return out, bool(peak.max() < _INFINITY)
