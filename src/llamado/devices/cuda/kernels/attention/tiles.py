"""Attention of many tokens: a tile of queries per block of threads, which share all loads of keys and values.

A tile has neighboring tokens that see mostly the same cells, and heads that share their keys. It goes through the
blocks that one of its queries sees: first their keys lie in shared memory, transposed, so that a thread multiplies
several queries with several keys from a few loads; then their values do. The sums of values stay in registers.

A thread has two parts. For scores and weights it has `rows` queries and four keys, and the eight threads of a group
have all keys of a block. For values it has other queries, and some columns of them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from llamado.devices.cuda.kernel import kernel
from llamado.devices.cuda.kernels.attention.cells import CellFormat
from llamado.devices.cuda.kernels.attention.scores import NO_SCORE, ScoreSteps
from llamado.devices.cuda.kernels.attention.tile_cells import (
    KEY_STRIDE,
    HeadCells,
    load_values,
    store_keys,
    store_values,
)
from llamado.devices.cuda.kernels.attention.tile_list import TileList
from llamado.devices.cuda.kernels.attention.values import output_factor
from llamado.devices.cuda.kernels.attention.visible import VisibleRow
from llamado.devices.cuda.kernels.functions import Functions, sum_of_eight
from llamado.devices.cuda.simt import WARP, Register, SimtCode, Variable
from llamado.devices.kernels.attention.visible import BLOCK, SEGMENT, WORD
from llamado.devices.simd import F16, F32, I16, I32, I64
from llamado.gguf.types import TensorType

THREADS = 128
_EIGHT, _FOUR = 8, 4
_COLUMN_GROUPS = 16
"""Threads that share the columns of a query's values, four columns of each 64."""
_WORDS = 64
"""Words of bitmaps in shared memory."""
_NEVER = 1 << 30
"""Block where a segment begins that a query does not have."""


class TileShape(NamedTuple):
    """Sizes of a tile: elements of keys and values, and heads."""

    head_k: int
    head_v: int
    heads: int

    @staticmethod
    def of(head_k: int, head_v: int, group: int) -> TileShape:
        """Choose the heads of a tile, which share their keys."""
        most = TileShape(head_k, head_v, 1).queries
        return TileShape(head_k, head_v, max(n for n in range(1, most + 1) if group % n == 0))

    @property
    def queries(self) -> int:
        return 64 if max(self.head_k, self.head_v) <= 128 else 32

    @property
    def tokens(self) -> int:
        """Most tokens of a tile."""
        return self.queries // self.heads

    @property
    def rows(self) -> int:
        """Queries whose scores a thread has."""
        return self.queries // (THREADS // _EIGHT)

    @property
    def added(self) -> int:
        """Queries whose values a thread has."""
        return self.queries // (THREADS // _COLUMN_GROUPS)

    @property
    def sets(self) -> int:
        """Fours of columns that a thread has."""
        return -(-self.head_v // (_FOUR * _COLUMN_GROUPS))

    @property
    def query_stride(self) -> int:
        """Bytes from one element of the queries to the next, and from the weights of one key to those of the next."""
        return 4 * (self.queries + 4)

    @property
    def cells_bytes(self) -> int:
        """Bytes of a block of keys, or of values."""
        return max(self.head_k * KEY_STRIDE, BLOCK * self.head_v * 4)

    @property
    def shared_bytes(self) -> int:
        return (self.head_k + BLOCK) * self.query_stride + self.cells_bytes + 8 * _WORDS + 44 * self.queries + 16

    @property
    def kept_bytes(self) -> int:
        """Bytes that a block of threads needs for the sums of values of earlier segments."""
        return self.queries * self.head_v * 4


class _Layout(NamedTuple):
    """Addresses in shared memory."""

    queries: Register
    weights: Register
    cells: Register
    words: Register
    q: Register
    """Addresses of each query, of its mask and of its visible row (i64)."""
    mask: Register
    row: Register
    fades: Register
    """Two factors of each query, the block where its next segment begins, and the number of later segments."""
    shares: Register
    bounds: Register
    behind: Register
    infinite: Register
    """1 if a value of the block is not finite."""

    @staticmethod
    def of(c: SimtCode, shape: TileShape) -> _Layout:
        n = shape.queries
        sizes = [
            shape.head_k * shape.query_stride, BLOCK * shape.query_stride, shape.cells_bytes, 8 * _WORDS,
            8 * n, 8 * n, 8 * n, 4 * n, 4 * n, 4 * n, 4 * n, 16,
        ]  # fmt: skip
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return _Layout(*(c.shared() + start for start in starts))


@kernel(
    "q", "q_token", "q_head", "q_stream", "k", "k_head", "k_stream", "k_cell", "v", "v_head", "v_stream", "v_cell",
    "mask", "mask_token", "mask_head", "mask_stream", "rows", "row_token", "row_head", "row_stream", "n_words",
    "tiles", "slopes", "sinks", "kept", "out", "out_head", "out_token", "out_stream", "n_heads", "group", "n_kv",
    "scale", "softcap",
)  # fmt: skip
def attend_tiles(
    c: SimtCode, a: SimpleNamespace, *, head_k: int, head_v: int, heads: int, keys: str, values: str, direct_k: bool,
    direct_v: bool, masked: bool, apart: bool, capped: bool, biased: bool, sinks: bool, single: bool,
) -> None:  # fmt: skip
    """Compute tiles of tokens (`tile_list.py`) for `heads` heads each.

    `apart`: every head has a mask of its own. `single`: rows have one segment at most.
    """
    shape = TileShape(head_k, head_v, heads)
    tile = _Tile(c, a, shape, _Variant(masked=masked, capped=capped, biased=biased, single=single))
    pieces = (a.n_heads // heads).to(I32)
    n_tiles = c.load(I32, a.tiles + TileList.COUNT)
    with c.range(c.block(), n_tiles * pieces, c.blocks()) as unit:
        # the longest tiles are begun first: the last tokens see most keys
        tile.begin(n_tiles - 1 - unit // pieces, unit % pieces)
        own = tile.unit
        key_head = own.head // a.group
        forms = CellFormat(TensorType[keys], direct_k), CellFormat(TensorType[values], direct_v)
        bases = (
            a.k + key_head * a.k_head + own.stream * a.k_stream, a.v + key_head * a.v_head + own.stream * a.v_stream,
        )  # fmt: skip
        n_kv = a.n_kv.to(I32)
        cells = [
            HeadCells(form, base, step, head, n_kv)
            for form, base, step, head in zip(forms, bases, (a.k_cell, a.v_cell), (head_k, head_v), strict=True)
        ]
        with c.range(c.i32(0), a.n_words.to(I32), _WORDS) as first_word:
            tile.find_words(first_word, apart=apart)
            with c.range(c.i32(0), c.min(a.n_words.to(I32) - first_word, _WORDS)) as word:
                bits = c.var(c.load(I64, tile.shared.words + word * 8))
                with c.loop() as blocks:
                    c.leave(blocks, bits.value.equals(0))
                    block = (first_word + word) * WORD + c.function("cttz", bits.value).to(I32)
                    bits.value = bits.value & (bits.value - 1)
                    if not single:
                        with c.when(block >= tile.next_bound.value):
                            tile.end_segments(block)
                    tile.add_block(block, cells[0], cells[1])
        tile.finish(sinks=sinks)
        c.barrier()


class _Unit(NamedTuple):
    """A tile: its stream, first token, number of tokens, and first head."""

    stream: Register
    token: Register
    tokens: Register
    head: Register


class _Variant(NamedTuple):
    """The parameters of `attend_tiles` that decide which code a tile has."""

    masked: bool
    capped: bool
    biased: bool
    single: bool


class _Tile:
    """Code for one tile."""

    unit: _Unit

    def __init__(
        self, c: SimtCode, a: SimpleNamespace, shape: TileShape, variant: _Variant
    ) -> None:  # fmt: skip
        self.c, self.a, self.shape, self.functions = c, a, shape, Functions(c)
        self.masked, self.biased, self.single = variant.masked, variant.biased, variant.single
        self.shared, self.scoring = _Layout.of(c, shape), ScoreSteps.of(a, capped=variant.capped)
        thread = self.thread = c.thread()
        self.key = thread % _EIGHT
        """Number of the first of the keys that this thread has scores for; the others are 8, 16 and 24 after it."""
        self.row = thread // _EIGHT * shape.rows
        """The first of the queries that this thread has scores for."""
        self.added = thread // _COLUMN_GROUPS * shape.added
        """The first of the queries that this thread adds values for."""
        fours = thread % _COLUMN_GROUPS
        self.fours = [c.min(fours + _COLUMN_GROUPS * i, shape.head_v // _FOUR - 1) for i in range(shape.sets)]
        """Numbers of the fours of columns; those past the end are computed, but not stored."""
        self.has = [fours + _COLUMN_GROUPS * i < shape.head_v // _FOUR for i in range(shape.sets)]
        rows, zero = range(shape.rows), c.f32(0.0)
        self.sums, self.peaks = [c.var(zero) for _ in rows], [c.var(zero) for _ in rows]
        self.kept_sums, self.kept_peaks = [c.var(zero) for _ in rows], [c.var(zero) for _ in rows]
        """Results of later segments."""
        self.outputs = [[[c.var(zero) for _ in range(_FOUR)] for _ in range(shape.sets)] for _ in range(shape.added)]
        self.next_bound = c.var(c.i32(_NEVER))
        """The first block where a segment of a query begins."""
        self.kept = a.kept + c.block().to(I64) * shape.kept_bytes

    # --- before the blocks -------------------------------------------------------------------------------------------
    def begin(self, number: Register, piece: Register) -> None:
        """Load the queries of a tile, and clear their results."""
        c, a, shape, shared = self.c, self.a, self.shape, self.shared
        at = a.tiles + number.to(I64) * TileList.BYTES + TileList.LIST
        stream, token, tokens = (c.load(I32, at + 4 * i).to(I64) for i in range(3))
        self.unit = _Unit(stream, token, tokens, piece.to(I64) * shape.heads)
        with c.when(self.thread < shape.queries):
            own = self._token_and_head(self.thread)
            row = self._address("row", *own)
            for name, to in (("q", shared.q), ("mask", shared.mask)):
                c.store(to + self.thread * 8, self._address(name, *own))
            c.store(shared.row + self.thread * 8, row)
            if not self.single:
                c.store(shared.behind + self.thread * 4, c.i32(0))
                c.store(shared.bounds + self.thread * 4, self._start(row, c.i32(1)))
        c.barrier()
        lane, warp = self.thread % WARP, self.thread // WARP
        n_warps, parts = THREADS // WARP, range(0, shape.head_k, WARP)
        with c.range(warp, c.i32(shape.queries), _FOUR * n_warps) as first:
            for part in parts:
                element = lane + part
                with c.when(element < shape.head_k):
                    numbers = [first + n_warps * i for i in range(_FOUR)]
                    elements = [
                        c.load(F32, c.load(I64, shared.q + query * 8) + element.to(I64) * 4) for query in numbers
                    ]
                    for query, value in zip(numbers, elements, strict=True):
                        c.store(shared.queries + element * shape.query_stride + query * 4, value)
        for variable in (*self.sums, *(v for query in self.outputs for four in query for v in four)):
            variable.value = c.f32(0.0)
        for variable in self.peaks:
            variable.value = c.f32(NO_SCORE)
        if not self.single:
            self._find_bound()

    def _token_and_head(self, query: Register) -> tuple[Register, Register]:
        """Numbers of a query's token and head. Queries past the end have the last token."""
        heads = self.shape.heads
        token = self.c.min((query // heads).to(I64), self.unit.tokens - 1)
        return self.unit.token + token, self.unit.head + (query % heads).to(I64)

    def _address(self, name: str, token: Register, head: Register) -> Register:
        """The address of a query's part of an operand that has strides."""
        steps = zip((token, head, self.unit.stream), ("token", "head", "stream"), strict=True)
        at: Register = getattr(self.a, {"row": "rows"}.get(name, name))
        for step, axis in steps:
            at = at + step * getattr(self.a, f"{name}_{axis}")
        return at

    def _start(self, row: Register, segment: Register) -> Register:
        """The block where a segment of a row begins; `_NEVER` if the row does not have it."""
        c, start = self.c, self.c.var(self.c.i32(_NEVER))
        with c.when(segment * SEGMENT < c.load(I32, row + VisibleRow.COUNT)):
            at = VisibleRow.numbers(row, self.a.n_words) + (segment * SEGMENT).to(I64) * 4
            start.value = c.load(I32, at)
        return start.value

    def _find_bound(self) -> None:
        c = self.c
        self.next_bound.value = c.i32(_NEVER)
        with c.range(c.i32(0), self.shape.queries, _FOUR) as query:
            for bound in c.load_words(self.shared.bounds + query * 4, _FOUR):
                self.next_bound.value = c.min(bound, self.next_bound.value)

    def find_words(self, first: Register, *, apart: bool) -> None:
        """Find the blocks that a query of the tile sees, for `_WORDS` words of the bitmaps."""
        c, heads = self.c, self.shape.heads
        c.barrier()
        with c.when((self.thread < _WORDS) & (first + self.thread < self.a.n_words.to(I32))):
            n = self.unit.tokens.to(I32) * (heads if apart else 1)
            offset = (first + self.thread).to(I64) * 8 + VisibleRow.BITS
            bits = c.var(c.i64(0))
            with c.range(c.i32(0), n, _FOUR) as i:
                for j in range(_FOUR):
                    query = c.min(i + j, n - 1) * (1 if apart else heads)
                    bits.value = bits.value | c.load(I64, c.load(I64, self.shared.row + query * 8) + offset)
            c.store(self.shared.words + self.thread * 8, bits.value)
        c.barrier()

    # --- a block -----------------------------------------------------------------------------------------------------
    def add_block(self, block: Register, keys: HeadCells, values: HeadCells) -> None:
        """Add a block of keys to the results of all queries; those that do not see it stay as they are."""
        c, shared, first = self.c, self.shared, block * BLOCK
        weights = self._mask(first) if self.masked else []
        store_keys(c, self.functions, keys, first, shared.cells, THREADS)
        with c.when(self.thread.equals(0)):
            c.store(shared.infinite, c.i32(0))
        c.barrier()
        words: list[Register] = []
        self._weigh(first, self._products(), weights)
        c.barrier()
        words = words or load_values(c, values, first, THREADS)
        check = store_values(c, self.functions, values, words, first, shared.cells, THREADS)
        with c.when(check.equals(0.0) ^ 1):
            c.store(shared.infinite, c.i32(1))
        c.barrier()
        self._add()
        c.barrier()

    def _keys(self, first: Register) -> list[Register]:
        """Cells of the keys that this thread has scores for."""
        return [first + self.key + _EIGHT * i for i in range(BLOCK // _EIGHT)]

    def _mask(self, first: Register) -> list[list[Register]]:
        """The numbers of the mask (f16) for this thread's queries and keys."""
        c, made = self.c, []
        for i in range(self.shape.rows):
            mask = c.load(I64, self.shared.mask + (self.row + i) * 8)
            cells = [c.min(cell, self.a.n_kv.to(I32) - 1) for cell in self._keys(first)]
            made.append([c.load(I16, mask + cell.to(I64) * 2) for cell in cells])
        return made

    def _products(self) -> list[list[Register]]:
        """The products of this thread's queries and keys, chain by chain."""
        c, shape = self.c, self.shape
        eights = shape.head_k // _EIGHT
        unrolled = max(n for n in range(1, 5) if eights % n == 0)

        def zeros(number: float) -> list[list[Variable]]:
            return [[c.var(c.f32(number)) for _ in range(_FOUR)] for _ in range(shape.rows)]

        def add_chain(to: list[list[Variable]], number: Register) -> None:
            sums = zeros(0.0)
            with c.range(c.i32(0), eights, unrolled) as i:
                for j in range(unrolled):
                    d = (i + j) * _EIGHT + number
                    key = c.load_words(self.shared.cells + d * KEY_STRIDE + self.key * 16, _FOUR)
                    at = self.shared.queries + d * shape.query_stride + self.row * 4
                    for own, query in zip(sums, c.load_words(at, shape.rows), strict=True):
                        for variable, word in zip(own, key, strict=True):
                            variable.value = c.fma(query.bits(F32), word.bits(F32), variable.value)
            add(to, sums)

        def add(to: list[list[Variable]], sums: list[list[Variable]]) -> None:
            for total, sum_ in zip((v for own in to for v in own), (v for own in sums for v in own), strict=True):
                total.value = total.value + sum_.value

        # ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)); −0 + x is x. Without loops, LLVM would keep all chains to the end
        products = zeros(-0.0)
        with c.range(c.i32(0), 2) as one:
            fours = zeros(-0.0)
            with c.range(c.i32(0), 2) as two:
                twos = zeros(-0.0)
                with c.range(c.i32(0), 2) as four:
                    add_chain(twos, one + two * 2 + four * 4)
                add(fours, twos)
            add(products, fours)
        return [[variable.value for variable in own] for own in products]

    def _weigh(self, first: Register, products: list[list[Register]], weights: list[list[Register]]) -> None:
        """Store weights and factors, and update sums and maxima."""
        c, shape, shared = self.c, self.shape, self.shared
        to = shared.weights + self.key * shape.query_stride + self.row * 4
        for i, row in enumerate(products):
            slope = None
            if self.biased:
                _, head = self._token_and_head(self.row + i)
                slope = c.load(F32, self.a.slopes + head * 4)
            scores = []
            for j, (product, cell) in enumerate(zip(row, self._keys(first), strict=True)):
                weight = weights[i][j].bits(F16).to(F32) if self.masked else None
                inside = cell < self.a.n_kv.to(I32)
                scores.append(self.scoring.score(c, self.functions, product, weight, slope, inside))
            peak = c.f32(NO_SCORE)
            for score in scores:
                peak = c.max(score, peak)
            for distance in (4, 2, 1):
                peak = c.max(peak, c.shuffle_xor(peak, distance, _EIGHT))
            now = c.max(peak, self.peaks[i].value)
            fade = self.functions.exp(self.peaks[i].value - now)
            total = self.sums[i].value * fade
            for j, score in enumerate(scores):
                weight = self.functions.exp(score - now)
                total = total + weight
                c.store(to + (_EIGHT * j * shape.query_stride + 4 * i), weight)
            self.sums[i].value, self.peaks[i].value = total, now
            with c.when(self.key.equals(0)):
                c.store(shared.fades + self.row * 4 + 4 * i, fade)

    def _add(self) -> None:
        """outputs = outputs · fade + Σ weight · value, key by key.

        The value of an unseen cell may be NaN, and 0 · NaN is not 0: if a value of the block is not finite, weights of
        0 are left out.
        """
        c, shared = self.c, self.shared
        for i, query in enumerate(self.outputs):
            fade = c.load(F32, shared.fades + (self.added + i) * 4)
            for four in query:
                for output in four:
                    output.value = output.value * fade
        infinite = c.load(I32, shared.infinite)
        for finite in (True, False):
            at_once = 2 if finite else 1
            with c.when(infinite.equals(0).equals(finite)), c.range(c.i32(0), BLOCK, at_once) as first:
                for k in range(at_once):
                    self._add_cell(first + k, finite=finite)

    def _add_cell(self, k: Register, *, finite: bool) -> None:
        c, shape = self.c, self.shape
        at = self.shared.weights + k * shape.query_stride + self.added * 4
        weights = [word.bits(F32) for i in range(0, shape.added, _FOUR) for word in c.load_words(at + 4 * i, _FOUR)]
        value_at = self.shared.cells + k * (4 * shape.head_v)
        values = [[w.bits(F32) for w in c.load_words(value_at + four * 16, _FOUR)] for four in self.fours]

        def add(weight: Register, query: list[list[Variable]]) -> None:
            for four, numbers in zip(query, values, strict=True):
                for output, value in zip(four, numbers, strict=True):
                    output.value = c.fma(weight, value, output.value)

        for weight, query in zip(weights, self.outputs, strict=True):
            if finite:
                add(weight, query)
            else:
                with c.when(weight.differs(0.0)):
                    add(weight, query)

    # --- segments ----------------------------------------------------------------------------------------------------
    def end_segments(self, block: Register) -> None:
        """Add the results of queries to those of the segments behind, if a segment of theirs begins at `block`."""
        c, shape, shared = self.c, self.shape, self.shared
        ends = [block >= c.load(I32, shared.bounds + (self.row + i) * 4) for i in range(shape.rows)]
        for i in range(shape.rows):
            self._add_sums(i, ends[i])
            self.sums[i].value = c.select(ends[i], c.f32(0.0), self.sums[i].value)
            self.peaks[i].value = c.select(ends[i], c.f32(NO_SCORE), self.peaks[i].value)
        c.barrier()
        for i, query in enumerate(self.outputs):
            with c.when(block >= c.load(I32, shared.bounds + (self.added + i) * 4)):
                for number, (at, output) in enumerate(self._kept_outputs(i)):
                    with c.when(self.has[number // _FOUR]):
                        c.store(at, self._with_kept(i, at, output.value))
                for four in query:
                    for output in four:
                        output.value = c.f32(0.0)
        c.barrier()
        own = self.thread * 4
        with c.when(self.thread < shape.queries), c.when(block >= c.load(I32, shared.bounds + own)):
            behind = c.load(I32, shared.behind + own) + 1
            c.store(shared.behind + own, behind)
            row = c.load(I64, shared.row + self.thread * 8)
            c.store(shared.bounds + own, self._start(row, behind + 1))
        c.barrier()
        self._find_bound()

    def _add_sums(self, i: int, on: Register) -> None:
        """Add sum and maximum of query i to those of the segments behind, where `on` holds, and store the factors for
        its outputs.
        """
        c, shared, query = self.c, self.shared, self.row + i
        total, peak = self.sums[i].value, self.peaks[i].value
        before, kept = self.kept_peaks[i].value, self.kept_sums[i].value
        has = c.load(I32, shared.behind + query * 4) > 0
        greatest = c.max(before, peak)
        fade, share = self.functions.exp(before - greatest), self.functions.exp(peak - greatest)
        self.kept_peaks[i].value = c.select(on, c.select(has, greatest, peak), before)
        self.kept_sums[i].value = c.select(on, c.select(has, c.fma(total, share, kept * fade), total), kept)
        with c.when(on & self.key.equals(0)):
            c.store(shared.fades + query * 4, fade)
            c.store(shared.shares + query * 4, share)

    def _kept_outputs(self, i: int) -> list[tuple[Register, Variable]]:
        """The outputs of one of this thread's queries, and the addresses of those of the segments behind."""
        query = self.kept + (self.added + i).to(I64) * (4 * self.shape.head_v)
        return [
            (query + (four.to(I64) * _FOUR + e) * 4, output)
            for four, outputs in zip(self.fours, self.outputs[i], strict=True)
            for e, output in enumerate(outputs)
        ]

    def _with_kept(self, i: int, at: Register, output: Register) -> Register:
        """An output with that of the segments behind, if there are any."""
        c, query = self.c, (self.added + i) * 4
        fade, share = c.load(F32, self.shared.fades + query), c.load(F32, self.shared.shares + query)
        whole = c.var(output)
        with c.when(c.load(I32, self.shared.behind + query) > 0):
            whole.value = c.fma(output, share, c.load(F32, at) * fade)
        return whole.value

    def finish(self, *, sinks: bool) -> None:
        """Store the outputs of all queries."""
        c, shape, shared = self.c, self.shape, self.shared
        for i in range(shape.rows):
            query = self.row + i
            total, peak = self.sums[i].value, self.peaks[i].value
            if not self.single:
                self._add_sums(i, c.i32(0).equals(0))
                total, peak = self.kept_sums[i].value, self.kept_peaks[i].value
            sink = None
            if sinks:
                _, head = self._token_and_head(query)
                sink = c.load(F32, self.a.sinks + head * 4)
            factor = output_factor(c, self.functions, sum_of_eight(c, total), peak, sink)
            with c.when(self.key.equals(0)):
                c.store(shared.weights + query * 4, factor)
        c.barrier()
        for i in range(shape.added):
            query = self.added + i
            factor = c.load(F32, shared.weights + query * 4)
            to = self._address("out", *self._token_and_head(query))
            inside = (query // shape.heads).to(I64) < self.unit.tokens
            for number, (at, output) in enumerate(self._kept_outputs(i)):
                four, element = divmod(number, _FOUR)
                with c.when(inside & self.has[four]):
                    value = output.value if self.single else self._with_kept(i, at, output.value)
                    c.store(to + (self.fours[four].to(I64) * _FOUR + element) * 4, value * factor)
