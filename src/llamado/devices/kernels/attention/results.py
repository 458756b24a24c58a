"""Partial attention results of a query, and their combination.

The result of a segment is the maximum score, the sum of the weights e^(score − maximum) in eight lanes, and the sum of
weight · value. Segments are combined from the first to the last, by one formula, wherever they were computed.
"""

from __future__ import annotations

from types import SimpleNamespace

from llamado.devices.kernel import kernel
from llamado.devices.kernels import maths
from llamado.devices.kernels.attention.visible import MaskRow
from llamado.devices.simd import F32, I32, I64, Code, F32x8, Value, Work

_NONE = -1e30  # the maximum before any key; finite, so that −inf − maximum stays −inf


class SegmentResult:
    """Byte offsets of a result's parts: the eight sums, the maximum score, the outputs (f32)."""

    SUMS, PEAK, OUTPUTS = 0, 32, 64

    @staticmethod
    def bytes(head_v: int) -> int:
        return SegmentResult.OUTPUTS + -(-4 * head_v // 64) * 64


def clear(c: Code, at: Value, head_v: int) -> None:
    """Store the result of no keys."""
    c.store(at + SegmentResult.SUMS, c.const(F32x8, 0.0))
    c.store(at + SegmentResult.PEAK, c.f32(_NONE))
    with c.range(0, head_v, 8) as d:
        c.store(at + SegmentResult.OUTPUTS + d * 4, c.const(F32x8, 0.0))


def add(c: Code, to: Value, of: Value, head_v: int) -> None:
    """Add the result of a segment to that of all segments before it."""
    before, peak = c.load(F32, to + SegmentResult.PEAK), c.load(F32, of + SegmentResult.PEAK)
    greatest = c.max(before, peak)
    fade, share = (maths.exp(c, p - greatest).splat(8) for p in (before, peak))

    def both(offset: Value | int) -> None:
        faded = c.load(F32x8, to + offset) * fade
        c.store(to + offset, c.fma(c.load(F32x8, of + offset), share, faded))

    c.store(to + SegmentResult.PEAK, greatest)
    both(SegmentResult.SUMS)
    with c.range(0, head_v, 8) as d:
        both(d * 4 + SegmentResult.OUTPUTS)


def finish(c: Code, at: Value, sink: Value | None, out: Value, head_v: int) -> None:
    """Write outputs / sum of weights. `sink`: the score of one more key, which has no value."""
    total = c.sum_lanes(c.load(F32x8, at + SegmentResult.SUMS))
    share = c.f32(1.0)
    if sink is not None:
        peak = c.load(F32, at + SegmentResult.PEAK)
        greatest = c.max(peak, sink)
        share = maths.exp(c, peak - greatest)
        total = total * share + maths.exp(c, sink - greatest)
    inverse = c.select(total > 0.0, share / total, c.f32(0.0)).splat(8)
    with c.range(0, head_v, 8) as d:
        c.store(out + d * 4, c.load(F32x8, at + SegmentResult.OUTPUTS + d * 4) * inverse)


@kernel(
    "partials", "n_words", "rows", "row_token", "row_head", "row_stream", "sinks",
    "out", "out_head", "out_token", "out_stream", "n_tokens", "n_heads", "n_streams",
)  # fmt: skip
def combine_segments(c: Code, a: SimpleNamespace, work: Work, *, head_v: int, sinks: bool) -> None:
    """Combine the results of a query's segments, which were computed separately: [stream][token][head][segment]."""
    with c.shares(work, a.n_tokens * a.n_heads * a.n_streams, c.i64(1)) as unit:
        h, token = unit % a.n_heads, unit // a.n_heads % a.n_tokens
        stream = unit // (a.n_heads * a.n_tokens)
        row = a.rows + token * a.row_token + h * a.row_head + stream * a.row_stream
        at = a.partials + unit * a.n_words * SegmentResult.bytes(head_v)
        with c.range(1, c.load(I32, row + MaskRow.SEGMENTS).to(I64)) as segment:
            add(c, at, at + segment * SegmentResult.bytes(head_v), head_v)
        to = a.out + h * a.out_head + token * a.out_token + stream * a.out_stream
        finish(c, at, c.load(F32, a.sinks + h * 4) if sinks else None, to, head_v)
