"""Combination of the results of a query's segments, from the first to the last."""

from __future__ import annotations

from types import SimpleNamespace

from llamado.devices.cuda.kernel import kernel
from llamado.devices.cuda.kernels.attention.scores import Unit
from llamado.devices.cuda.kernels.attention.values import output_factor
from llamado.devices.cuda.kernels.attention.visible import VisibleRow
from llamado.devices.cuda.kernels.functions import Functions, sum_of_eight
from llamado.devices.cuda.simt import SimtCode
from llamado.devices.kernels.attention.results import SegmentResult
from llamado.devices.kernels.attention.visible import SEGMENT
from llamado.devices.simd import F32, I32, I64

THREADS = 128
"""Columns of a block of threads."""

_AT_ONCE = 8
"""Segments whose results are loaded together: loads take much longer than sums."""


@kernel(
    "partials", "n_words", "rows", "row_token", "row_head", "row_stream", "sinks",
    "out", "out_head", "out_token", "out_stream", "n_tokens", "n_heads",
)  # fmt: skip
def combine_segments(c: SimtCode, a: SimpleNamespace, *, head: int, sinks: bool) -> None:
    """Combine the results of query y, for the columns of number x."""
    functions, size = Functions(c), SegmentResult.bytes(head)
    unit = Unit.of(a, c.block("y").to(I64), 1)
    count = c.load(I32, unit.address(a, "row") + VisibleRow.COUNT)
    n = (count + (SEGMENT - 1)) // SEGMENT
    column, lane = c.block() * THREADS + c.thread(), c.thread() & 7
    first = a.partials + unit.record * a.n_words * size
    offsets = [
        c.i64(SegmentResult.PEAK),
        lane.to(I64) * 4 + SegmentResult.SUMS,
        c.min(column, head - 1).to(I64) * 4 + SegmentResult.OUTPUTS,
    ]
    peak, total, output = (c.var(c.load(F32, first + offset)) for offset in offsets)
    with c.range(c.i32(1), n, _AT_ONCE) as segment:
        results = []
        for i in range(_AT_ONCE):
            at = first + c.min(segment + i, n - 1).to(I64) * size
            results.append([c.load(F32, at + offset) for offset in offsets])
        for i, (other, sum_, values) in enumerate(results):
            greatest = c.max(peak.value, other)
            fade, share = functions.exp(peak.value - greatest), functions.exp(other - greatest)
            here = segment + i < n
            total.value = c.select(here, c.fma(sum_, share, total.value * fade), total.value)
            output.value = c.select(here, c.fma(values, share, output.value * fade), output.value)
            peak.value = c.select(here, greatest, peak.value)
    sink = c.load(F32, a.sinks + unit.head * 4) if sinks else None
    factor = output_factor(c, functions, sum_of_eight(c, total.value), peak.value, sink)
    with c.when(column < head):
        c.store(unit.address(a, "out") + column.to(I64) * 4, output.value * factor)
