"""Weighted values of a few queries: one segment of some columns of the values.

The sum of a column runs over all cells of the segment, one after the other. So one thread has one column of one query,
and does nothing else. Other threads help: they copy the cells of the next rounds to shared memory, compute the weights
of the next round and add up those of this one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from llamado.devices.cuda.kernel import kernel
from llamado.devices.cuda.kernels.attention.cells import CellFormat, Span
from llamado.devices.cuda.kernels.attention.scores import NO_SCORE, ScoreRecord, Unit
from llamado.devices.cuda.kernels.attention.visible import VisibleRow
from llamado.devices.cuda.kernels.functions import Functions, sum_of_eight
from llamado.devices.cuda.simt import WARP, Register, SimtCode, Variable
from llamado.devices.kernels.attention.results import SegmentResult
from llamado.devices.kernels.attention.visible import BLOCK, SEGMENT
from llamado.devices.simd import F32, I32, I64
from llamado.gguf.types import TensorType

_BLOCKS = 4
"""Blocks of a round."""
_CELLS = _BLOCKS * BLOCK
_RING_BYTES = 40 << 10
"""Most shared memory for values, if two rounds fit."""

assert SEGMENT == 2 * WARP  # a thread of a warp has the maxima of two blocks


class Division(NamedTuple):
    """The part of a block of threads: `heads` queries, and `columns` of the `head` elements of a value."""

    head: int
    heads: int
    columns: int
    values: CellFormat

    @staticmethod
    def of(head: int, heads: int, values: CellFormat) -> Division:
        """Choose the columns: few, so that there are many blocks, but enough for the threads of a block."""
        columns = 32 if heads >= 4 else 64
        return Division(head, heads, min(columns, -(-head // WARP) * WARP), values)

    @property
    def n_slices(self) -> int:
        """Blocks of threads that share the columns of a value."""
        return -(-self.head // self.columns)

    @property
    def adders(self) -> int:
        """Threads that have a column of a query."""
        return self.heads * self.columns

    @property
    def helpers(self) -> int:
        """Threads that help: at least eight for each query, and more if they convert values."""
        if not self.values.direct:
            return 256
        return 64 if self.heads <= 4 else 128

    @property
    def threads(self) -> int:
        return self.adders + self.helpers

    @property
    def ring(self) -> int:
        """Rounds whose values are in shared memory."""
        return max(2, min(4, _RING_BYTES // self.stage))

    @property
    def stage(self) -> int:
        """Bytes of the values of a round."""
        return _CELLS * self.columns * self.values.bytes

    @property
    def shared_bytes(self) -> int:
        return self.ring * self.stage + 4 * (self.heads * (2 * _CELLS + 2 * SEGMENT + 1) + SEGMENT)


class _Layout(NamedTuple):
    """Addresses in shared memory: rounds of values, two rounds of weights, and for each block of the segment the
    running maximum, the factor of the sums so far and its number in the cache; 1 / sum of each query.
    """

    values: Register
    weights: Register
    maxima: Register
    fades: Register
    numbers: Register
    inverses: Register

    @staticmethod
    def of(c: SimtCode, part: Division) -> _Layout:
        at, sizes = c.shared(), (part.ring * part.stage, 8 * part.heads * _CELLS)
        weights = at + sizes[0]
        maxima = weights + sizes[1]
        fades = maxima + 4 * part.heads * SEGMENT
        numbers = fades + 4 * part.heads * SEGMENT
        return _Layout(at, weights, maxima, fades, numbers, numbers + 4 * SEGMENT)


@kernel(
    "v", "v_head", "v_stream", "v_cell", "rows", "row_token", "row_head", "row_stream", "n_words", "n_kv", "scores",
    "partials", "out", "out_head", "out_token", "out_stream", "sinks", "n_tokens", "n_heads", "group",
)  # fmt: skip
def add_values(
    c: SimtCode, a: SimpleNamespace, *, head: int, heads: int, values: str, direct: bool, single: bool, sinks: bool
) -> None:
    """Compute the results of segments for the queries and columns of number y. Segments are divided among the x axis of
    the grid.

    `single`: rows have one segment at most, and this is the result of the attention. Otherwise it goes to `partials`.
    """
    part = Division.of(head, heads, CellFormat(TensorType[values], direct))
    number = c.block("y").to(I64)
    unit = Unit.of(a, number // part.n_slices, heads)
    count = c.load(I32, unit.address(a, "row") + VisibleRow.COUNT)
    n = c.max((count + (SEGMENT - 1)) // SEGMENT, 1)  # a row that sees nothing has an empty segment
    with c.range(c.block(), n, c.blocks()) as segment:
        _Segment(c, a, part, unit, segment, (number % part.n_slices).to(I32)).run(count, single=single, sinks=sinks)


class _Segment:
    """Code for one segment."""

    def __init__(
        self, c: SimtCode, a: SimpleNamespace, part: Division, unit: Unit, segment: Register, slice_: Register
    ) -> None:
        self.c, self.a, self.part, self.unit, self.slice = c, a, part, unit, slice_
        self.functions, self.shared = Functions(c), _Layout.of(c, part)
        self.thread, self.segment = c.thread(), segment
        self.helper = self.thread - part.adders
        """Number of this thread among those that help; negative if it has a column."""
        self.query = self.thread // part.columns
        self.column = self.thread % part.columns
        self.first_column = slice_ * part.columns
        self.record = ScoreRecord.address(a, unit.record)
        self.record_step = ScoreRecord.address(a, unit.record + 1) - self.record

    def run(self, count: Register, *, single: bool, sinks: bool) -> None:
        c, part = self.c, self.part
        n_blocks = c.min(count - self.segment * SEGMENT, SEGMENT)
        n_rounds = (n_blocks + (_BLOCKS - 1)) // _BLOCKS
        self._find_maxima(n_blocks)
        c.barrier()
        helps, adds = self.helper >= 0, self.helper < 0
        total, sum_ = c.var(c.f32(0.0)), c.var(c.f32(0.0))
        with c.when(helps):
            for number in range(part.ring - 1):
                self._fetch(c.i32(number), n_rounds)
            self._weigh(c.i32(0))
            c.wait(part.ring - 2)
        c.barrier()
        with c.range(c.i32(0), n_rounds) as round_:
            with c.when(adds):
                self._add(round_, n_blocks, total)
            with c.when(helps):
                self._fetch(round_ + (part.ring - 1), n_rounds)
                with c.when(round_ + 1 < n_rounds):
                    self._weigh(round_ + 1)
                with c.when(self.helper < 8 * part.heads):
                    self._sum(round_, n_blocks, sum_)
                c.wait(part.ring - 2)
            c.barrier()
        if single:
            with c.when(helps & (self.helper < 8 * part.heads)):
                self._store_inverse(sum_.value, sinks=sinks)
            c.barrier()
        with c.when(adds & (self.first_column + self.column < part.head)):
            self._store(total.value, single=single)
        if not single:
            with c.when(helps & (self.helper < 8 * part.heads) & self.slice.equals(0)):
                self._store_sum(sum_.value)
            c.barrier()

    # --- before the rounds -------------------------------------------------------------------------------------------
    def _find_maxima(self, n_blocks: Register) -> None:
        """List the blocks of the segment, and compute the running maximum of each query: a warp for each."""
        c, a = self.c, self.a
        with c.when(self.thread < n_blocks):
            row = self.unit.address(a, "row")
            at = VisibleRow.numbers(row, a.n_words) + (self.segment * SEGMENT + self.thread).to(I64) * 4
            c.store(self.shared.numbers + self.thread * 4, c.load(I32, at))
        lane, warp = self.thread & (WARP - 1), self.thread // WARP
        with c.when(warp < self.part.heads):
            record = self.record + self.record_step * warp.to(I64)
            at = ScoreRecord.peaks(record, a.n_words) + (self.segment * SEGMENT + lane * 2).to(I64) * 4
            none = c.f32(NO_SCORE)
            one, other = (c.select(lane * 2 + i < n_blocks, c.load(F32, at + 4 * i), none) for i in range(2))
            up_to = c.max(one, other)
            for distance in (1, 2, 4, 8, 16):
                below = c.shuffle(up_to, lane - distance)
                up_to = c.select(lane >= distance, c.max(below, up_to), up_to)
            before = c.select(lane > 0, c.shuffle(up_to, lane - 1), none)
            for i, peak in enumerate((one, other)):
                now = c.max(peak, before)
                place = (warp * SEGMENT + lane * 2 + i) * 4
                c.store(self.shared.maxima + place, now)
                c.store(self.shared.fades + place, self.functions.exp(before - now))
                before = now

    # --- threads that help -------------------------------------------------------------------------------------------
    def _fetch(self, round_: Register, n_rounds: Register) -> None:
        """Begin to copy the values of a round."""
        c, a, part = self.c, self.a, self.part
        n_kv = a.n_kv.to(I32)
        base = a.v + self.unit.head // a.group * a.v_head + self.unit.stream * a.v_stream

        def cell(i: Register) -> Register:
            block = c.load(I32, self.shared.numbers + (round_ * _BLOCKS + i // BLOCK) * 4)
            inside = c.max(c.min(block * BLOCK + i % BLOCK, n_kv - 1), 0)
            return base + inside.to(I64) * a.v_cell  # type: ignore[no-any-return]

        with c.when(round_ < n_rounds):
            to = self.shared.values + round_ % part.ring * part.stage
            span = Span(cell, _CELLS, self.first_column, part.columns, part.head)
            part.values.fetch(c, self.functions, to, part.columns * part.values.bytes, span, self.helper, part.helpers)
        c.commit()

    def _weights(self, round_: Register) -> Register:
        """The address of the weights of a round, those of the queries one after the other."""
        return self.shared.weights + round_ % 2 * (4 * self.part.heads * _CELLS)

    def _weigh(self, round_: Register) -> None:
        """Compute the weights of a round: e^(score − maximum)."""
        c, part = self.c, self.part
        threads = min(part.helpers, _CELLS)
        places = [divmod(i, _CELLS) for i in range(0, part.heads * _CELLS, threads)]
        with c.when(self.helper < threads):
            at = self.record + ((self.segment * SEGMENT + round_ * _BLOCKS) * BLOCK + self.helper).to(I64) * 4
            scores = [c.load(F32, at + self.record_step * query + 4 * first) for query, first in places]
            for score, (query, first) in zip(scores, places, strict=True):
                cell = self.helper + first
                block = query * SEGMENT + round_ * _BLOCKS + cell // BLOCK
                weight = self.functions.exp(score - c.load(F32, self.shared.maxima + block * 4))
                c.store(self._weights(round_) + (query * _CELLS + cell) * 4, weight)

    def _sum(self, round_: Register, n_blocks: Register, sum_: Variable) -> None:
        """Add the weights of a round: eight threads for each query."""
        c, query, lane = self.c, self.helper // 8, self.helper & 7
        for i in range(_BLOCKS):
            block = round_ * _BLOCKS + i
            with c.when(block < n_blocks):
                total = sum_.value * c.load(F32, self.shared.fades + (query * SEGMENT + block) * 4)
                for j in range(0, BLOCK, 8):
                    at = self._weights(round_) + (query * _CELLS + i * BLOCK + j + lane) * 4
                    total = total + c.load(F32, at)
                sum_.value = total

    # --- threads that have a column ----------------------------------------------------------------------------------
    def _add(self, round_: Register, n_blocks: Register, total: Variable) -> None:
        """total = total · fade + Σ weight · value, cell by cell.

        The value of an unseen cell may be NaN, and 0 · NaN is not 0. A NaN shows in the sum, which is then computed
        again without cells of weight 0.
        """
        c, part = self.c, self.part
        stride = part.columns * part.values.bytes
        column = c.min(self.column, part.head - 1 - self.first_column) * part.values.bytes
        for i in range(_BLOCKS):
            block = round_ * _BLOCKS + i
            weights = self._weights(round_) + (self.query * _CELLS + i * BLOCK) * 4
            values = self.shared.values + round_ % part.ring * part.stage + i * BLOCK * stride + column
            with c.when(block < n_blocks):
                before = total.value * c.load(F32, self.shared.fades + (self.query * SEGMENT + block) * 4)
                after = before
                for k in range(0, BLOCK, 4):
                    for j, weight in enumerate(c.load_words(weights + 4 * k, 4)):
                        after = c.fma(weight.bits(F32), part.values.load(c, values + (k + j) * stride), after)
                total.value = after
                with c.when((after * 0.0).equals(0.0) ^ 1):
                    total.value = before
                    with c.range(c.i32(0), BLOCK) as cell:
                        own = c.load(F32, weights + cell * 4)
                        with c.when(own.differs(0.0)):
                            total.value = c.fma(own, part.values.load(c, values + cell * stride), total.value)

    # --- results -----------------------------------------------------------------------------------------------------
    def _peak(self, query: Register) -> Register:
        """The greatest score of the segment."""
        return self.c.load(F32, self.shared.maxima + (query * SEGMENT + (SEGMENT - 1)) * 4)

    def _store_inverse(self, sum_: Register, *, sinks: bool) -> None:
        """Store the factor of each query's outputs."""
        c, query = self.c, self.helper // 8
        sink = c.load(F32, self.a.sinks + (self.unit.head + query.to(I64)) * 4) if sinks else None
        factor = output_factor(c, self.functions, sum_of_eight(c, sum_), self._peak(query), sink)
        with c.when((self.helper & 7).equals(0)):
            c.store(self.shared.inverses + query * 4, factor)

    def _partial(self, query: Register) -> Register:
        number = (self.unit.record + query.to(I64)) * self.a.n_words + self.segment.to(I64)
        return self.a.partials + number * SegmentResult.bytes(self.part.head)  # type: ignore[no-any-return]

    def _store(self, total: Register, *, single: bool) -> None:
        c, a = self.c, self.a
        element = (self.first_column + self.column).to(I64) * 4
        if single:
            to = self.unit.address(a, "out") + self.query.to(I64) * a.out_head
            c.store(to + element, total * c.load(F32, self.shared.inverses + self.query * 4))
        else:
            c.store(self._partial(self.query) + element + SegmentResult.OUTPUTS, total)

    def _store_sum(self, sum_: Register) -> None:
        c, query, lane = self.c, self.helper // 8, self.helper & 7
        to = self._partial(query)
        c.store(to + lane.to(I64) * 4 + SegmentResult.SUMS, sum_)
        with c.when(lane.equals(0)):
            c.store(to + SegmentResult.PEAK, self._peak(query))


def output_factor(
    c: SimtCode, functions: Functions, total: Register, peak: Register, sink: Register | None
) -> Register:
    """1 / sum of weights, 0 if there are none. `sink`: the score of one more key, which has no value."""
    share = c.f32(1.0)
    if sink is not None:
        greatest = c.max(peak, sink)
        share = functions.exp(peak - greatest)
        total = total * share + functions.exp(sink - greatest)
    return c.select(total > 0.0, share / total, c.f32(0.0))
