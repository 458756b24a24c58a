"""Scores of a few queries: q·k of all cells that a token sees, one key per thread.

A warp takes one block of keys at a time, whose cells come through shared memory while it computes the ones before. All
queries of a block of threads are of the same token, and of heads that share their keys.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from llamado.devices.cuda.kernel import kernel
from llamado.devices.cuda.kernels.attention.cells import CellFormat, Span
from llamado.devices.cuda.kernels.attention.visible import VisibleRow
from llamado.devices.cuda.kernels.functions import Functions
from llamado.devices.cuda.simt import WARP, Register, SimtCode
from llamado.devices.kernels.attention.visible import BLOCK, WORD
from llamado.devices.simd import F16, F32, I32, I64
from llamado.gguf.types import TensorType

NO_SCORE = -1e30
"""The maximum before any key; finite, so that −inf − maximum stays −inf."""

MOST_HEADS = 8
"""Most heads of a block of threads."""

_RING = 2
"""Pieces of keys in shared memory: one is used while the next one comes."""
_PIECE = 72
"""Most elements of a key in shared memory."""

assert BLOCK == WARP


class ScoreRecord:
    """Scores of a query: one f32 for each cell of the blocks that it sees, in order, and the greatest of each block."""

    @staticmethod
    def bytes(n_words: int) -> int:
        return n_words * WORD * 4 * (BLOCK + 1)

    @staticmethod
    def address(a: SimpleNamespace, number: Register) -> Register:
        return a.scores + number * (a.n_words * (WORD * 4 * (BLOCK + 1)))  # type: ignore[no-any-return]

    @staticmethod
    def peaks(record: Register, n_words: Register) -> Register:
        return record + n_words * (WORD * 4 * BLOCK)


class ScoreSteps(NamedTuple):
    """The steps from a product to a score. `scale` includes the division by the soft cap."""

    scale: Register
    softcap: Register | None

    @staticmethod
    def of(a: SimpleNamespace, *, capped: bool) -> ScoreSteps:
        return ScoreSteps(a.scale.to(I32).bits(F32), a.softcap.to(I32).bits(F32) if capped else None)

    def score(
        self, c: SimtCode, functions: Functions, product: Register, weight: Register | None, slope: Register | None,
        inside: Register,
    ) -> Register:  # fmt: skip
        """The score of a key: `weight` is its number in the mask. −inf if it is not inside the cache or masked."""
        score = product * self.scale
        if self.softcap is not None:
            score = functions.tanh(score) * self.softcap
        if weight is not None:
            inside = inside & (weight > float("-inf"))  # hides any content of an unseen key, NaN as well
            score = score + (weight if slope is None else weight * slope)
        return c.select(inside, score, c.f32(float("-inf")))


class Unit(NamedTuple):
    """Queries of a block of threads: heads from `head` on of one token. `record`: number of the first one's result."""

    stream: Register
    token: Register
    head: Register
    record: Register

    @staticmethod
    def of(a: SimpleNamespace, number: Register, heads: int) -> Unit:
        pieces = a.n_heads // heads
        token, stream = number // pieces % a.n_tokens, number // pieces // a.n_tokens
        head = number % pieces * heads
        return Unit(stream, token, head, (stream * a.n_tokens + token) * a.n_heads + head)

    def address(self, a: SimpleNamespace, name: str) -> Register:
        """The address of the first query's part of an operand that has strides."""
        steps = zip((self.token, self.head, self.stream), ("token", "head", "stream"), strict=True)
        at: Register = getattr(a, {"row": "rows"}.get(name, name))
        for step, axis in steps:
            at = at + step * getattr(a, f"{name}_{axis}")
        return at


def piece_of(head: int) -> int:
    """Elements of a key that are in shared memory at once: a part of the head in whole eights."""
    return max(n for n in range(8, min(head, _PIECE) + 1, 8) if head % n == 0)


def warps_of(keys: CellFormat) -> int:
    """Warps of a block of threads."""
    return 4 if keys.bytes == 2 else 2


def shared_bytes(head: int, heads: int, keys: CellFormat) -> int:
    """Shared memory of a block of threads."""
    return 4 * heads * head + warps_of(keys) * _RING * BLOCK * _stride(head, keys)


def _stride(head: int, keys: CellFormat) -> int:
    """Bytes from one key to the next in shared memory: 16 more than needed, so that threads use different banks."""
    return piece_of(head) * keys.bytes + 16


@kernel(
    "q", "q_token", "q_head", "q_stream", "k", "k_head", "k_stream", "k_cell",
    "mask", "mask_token", "mask_head", "mask_stream", "rows", "row_token", "row_head", "row_stream",
    "n_words", "n_kv", "slopes", "scores", "n_tokens", "n_heads", "group", "scale", "softcap",
)  # fmt: skip
def compute_scores(
    c: SimtCode, a: SimpleNamespace, *, head: int, heads: int, keys: str, direct: bool, masked: bool, capped: bool,
    biased: bool,
) -> None:  # fmt: skip
    """Store the scores and the greatest score of each visible block of `heads` queries. Blocks of keys are divided
    among the x axis of the grid; its y axis numbers tokens and heads.
    """
    form, functions = CellFormat(TensorType[keys], direct), Functions(c)
    warps, piece, stride = warps_of(form), piece_of(head), _stride(head, form)
    n_pieces = head // piece
    thread = c.thread()
    lane, warp = thread & (WARP - 1), thread // WARP
    unit = Unit.of(a, c.block("y").to(I64), heads)
    row, n_kv = unit.address(a, "row"), a.n_kv.to(I32)
    numbers, count = VisibleRow.numbers(row, a.n_words), c.load(I32, row + VisibleRow.COUNT)
    mask, record = unit.address(a, "mask"), ScoreRecord.address(a, unit.record)
    record_step = ScoreRecord.address(a, unit.record + 1) - record
    k = a.k + unit.head // a.group * a.k_head + unit.stream * a.k_stream
    queries = c.shared()
    ring = queries + 4 * heads * head + warp * (_RING * BLOCK * stride)

    # this warp's blocks: number `first` of those that the token sees, and every `step`-th after it
    slots = c.blocks()
    first, step = c.block() + slots * warp, slots * warps
    n = c.select(first < count, (count - first + step - 1) // step, c.i32(0))

    def block_number(i: Register) -> Register:
        return c.load(I32, numbers + c.max(c.min(first + i * step, count - 1), 0).to(I64) * 4)

    def fetch(block: Register, part: Register, place: Register) -> None:
        def cell(i: Register) -> Register:
            address: Register = k + c.min(block * BLOCK + i, n_kv - 1).to(I64) * a.k_cell
            return address

        span = Span(cell, BLOCK, part * piece, piece, head)
        form.fetch(c, functions, ring + place * (BLOCK * stride), stride, span, lane, WARP)

    current, following = c.var(c.i32(0)), c.var(c.i32(0))
    with c.when(n > 0):
        current.value, following.value = block_number(c.i32(0)), block_number(c.i32(1))
        fetch(current.value, c.i32(0), c.i32(0))
    c.commit()
    q = unit.address(a, "q")
    for number in range(0, heads * head, WARP * warps):
        element = thread + number
        with c.when(element < heads * head):
            at = q + (element // head).to(I64) * a.q_head + (element % head).to(I64) * 4
            c.store(queries + element * 4, c.load(F32, at))
    c.barrier()

    scoring = ScoreSteps.of(a, capped=capped)
    with c.range(c.i32(0), n) as i:
        block, place = current.value, first + i * step
        own = block * BLOCK + lane
        ahead = block_number(i + 2)
        weight = c.f32(0.0)
        if masked:
            weight = c.load(F16, mask + c.min(own, n_kv - 1).to(I64) * 2).to(F32)
        sums = [[c.var(c.f32(0.0)) for _ in range(8)] for _ in range(heads)]
        with c.range(c.i32(0), n_pieces) as part:
            last = (part + 1).equals(n_pieces)
            turn = i * n_pieces + part
            with c.when((i + 1 < n) | (last ^ 1)):
                next_part = c.select(last, c.i32(0), part + 1)
                fetch(c.select(last, following.value, block), next_part, (turn + 1) % _RING)
            c.commit()
            c.wait(1)
            c.sync()
            key_at = ring + turn % _RING * (BLOCK * stride) + lane * stride
            for d in range(0, piece, 8):
                key = form.load_eight(c, key_at + d * form.bytes)
                for h, chains in enumerate(sums):
                    at = queries + part * (4 * piece) + 4 * (h * head + d)
                    query = [*c.load_words(at, 4), *c.load_words(at + 16, 4)]
                    for chain, x, y in zip(chains, query, key, strict=True):
                        chain.value = c.fma(x.bits(F32), y, chain.value)
            c.sync()
        for h, chains in enumerate(sums):
            product = sum_of_chains([chain.value for chain in chains])
            slope = c.load(F32, a.slopes + (unit.head + h) * 4) if biased else None
            score = scoring.score(c, functions, product, weight if masked else None, slope, own < n_kv)
            to = record + record_step * h
            c.store(to + (place * BLOCK + lane).to(I64) * 4, score)
            peak = c.max(score, NO_SCORE)
            for distance in (16, 8, 4, 2, 1):
                peak = c.max(peak, c.shuffle_xor(peak, distance))
            with c.when(lane.equals(0)):
                c.store(ScoreRecord.peaks(to, a.n_words) + place.to(I64) * 4, peak)
        current.value, following.value = following.value, ahead


def sum_of_chains(chains: list[Register]) -> Register:
    """The sum of eight chains of a product, in the tree of `simd.Code.sum_lanes`."""
    while len(chains) > 1:
        half = len(chains) // 2
        chains = [x + y for x, y in zip(chains[:half], chains[half:], strict=True)]
    return chains[0]
