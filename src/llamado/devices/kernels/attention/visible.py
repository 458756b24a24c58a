"""Visible key blocks of each mask row, and the tiles of rows that are processed together: computed once per graph.

Cells are counted in blocks of `BLOCK`. Each row has a bitmap of its visible blocks and the start of each segment: a
segment is `SEGMENT` blocks *that the row sees*, counted from its first one. So a token's segments do not depend on the
position of its sequence in the cache, or the number of pieces it is in.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from llamado.devices.kernel import kernel
from llamado.devices.simd import I16, I32, I64, Code, I16x32, Value, Var, Work

BLOCK = 32
"""Keys per block, the same for every kernel and batch size: it decides where the running maximum changes."""
SEGMENT = 64
"""Blocks per segment, the same everywhere, too: results of segments are combined in order."""
WORD = 64
"""Blocks in a word of a bitmap."""

_EVEN = 4
"""The last unit of work may delay the other threads by at most 1/_EVEN of a thread's work."""

_HIDDEN = -1024
"""0xFC00: −inf in f16."""


class MaskRow:
    """Byte offsets of a mask row's record: one past the last visible cell and the number of segments (i32), the bitmap
    (i64), the first block of each segment followed by one past the last block (i32).
    """

    LAST, SEGMENTS, BITS = 0, 4, 8

    @staticmethod
    def starts(row: Value, n_words: Value) -> Value:
        return row + MaskRow.BITS + n_words * 8

    @staticmethod
    def bytes(n_words: int) -> int:
        return MaskRow.BITS + 8 * n_words + (4 * (n_words + 1) + 7) // 8 * 8


def words_of(n_kv: int) -> int:
    """Words of a row's bitmap, and its most segments."""
    return max(1, -(-n_kv // (BLOCK * WORD)))


class Tile:
    """Byte offsets of a tile's record, all i64: stream, first token, number of tokens, first segment, last segment + 1.
    The list of tiles begins with their number, the heads of a group processed at once, and the number of key heads.
    """

    STREAM, FIRST, TOKENS, START, STOP = 0, 8, 16, 24, 32
    BYTES = 40
    COUNT, HEADS, KEY_HEADS, LIST = 0, 8, 16, 24


@kernel("mask", "nb1", "n_kv", "n_words", "n_rows", "rows", "row_step")
def visible_blocks(c: Code, a: SimpleNamespace, work: Work, *, masked: bool) -> None:
    """Store the bitmap of the visible blocks of each row of an f16 mask (without mask: one row that sees
    everything).
    """
    with c.shares(work, a.n_rows * a.n_words, c.i64(1)) as unit:
        row, word = unit // a.n_words, unit % a.n_words
        at, first = a.mask + row * a.nb1, word * (BLOCK * WORD)
        stop = c.min(first + BLOCK * WORD, a.n_kv)
        whole = (stop - first) // BLOCK
        bits = c.var(c.i64(0))
        if masked:
            with c.range(0, whole) as b:
                seen = c.load(I16x32, at + (first + b * BLOCK) * 2).differs(_HIDDEN)
                bits.value = bits.value | (seen.bits(I32).differs(0).zext(I64) << b)
            with c.range(first + whole * BLOCK, stop) as cell:
                bits.value = bits.value | (c.load(I16, at + cell * 2).differs(_HIDDEN).zext(I64) << whole)
        else:
            bits.value = below(c, (stop - first + (BLOCK - 1)) // BLOCK)
        c.store(a.rows + row * a.row_step + MaskRow.BITS + word * 8, bits.value)


def below(c: Code, n: Value) -> Value:
    """A word with the bits below bit n, for any n."""
    inside = c.min(c.select(n < 0, c.i64(0), n), 63)
    return c.select(n > 63, c.i64(-1), (c.i64(1) << inside) - 1)


@kernel(
    "mask", "nb1", "n_kv", "n_words", "n_rows", "rows", "row_step", "token_step", "stream_step",
    "n_tokens", "n_streams", "n_heads_kv", "group", "most", "units", "threads", "tiles",
)  # fmt: skip
def find_tiles(c: Code, a: SimpleNamespace, work: Work, *, masked: bool, divided: bool) -> None:
    """Find the start of each row's segments, and form tiles: neighboring tokens that see mostly the same cells share
    their loads.

    A tile has at most `most` queries, and there are `units` of work if there are enough tokens. `divided`: every
    segment of a tile is a unit of its own. `token_step`, `stream_step`: bytes from the row of one token, or stream, to
    the next one's. Writes one list, so one thread does it.
    """
    with c.shares(work, c.i64(1), c.i64(1)):
        with c.range(0, a.n_rows) as number:
            _segments(c, a, a.rows + number * a.row_step, a.mask + number * a.nb1, masked=masked)
        parts = c.var(c.i64(0))  # units if every token were a tile and every head separate
        with c.range(0, a.n_streams) as stream, c.range(0, a.n_tokens) as token:
            row = a.rows + stream * a.stream_step + token * a.token_step
            parts.value = parts.value + (_n_parts(c, row) if divided else 1)
        parts.value = parts.value * a.n_heads_kv
        pieces = c.var((a.group + (a.most - 1)) // a.most)  # pieces that a group of heads is cut into
        needed = (a.threads + parts.value - 1) // parts.value
        pieces.value = c.min(a.group, c.max(pieces.value, needed))
        heads = (a.group + pieces.value - 1) // pieces.value
        share = c.max(parts.value // a.units, c.i64(1))
        room = c.min(share, a.most // heads)
        n, totals = c.var(c.i64(0)), _TileTotals(*(c.var(c.i64(1)) for _ in _TileTotals._fields))
        with c.range(0, a.n_streams) as stream:
            first = c.var(c.i64(0))
            with c.range(0, a.n_tokens) as token:
                row = a.rows + stream * a.stream_step + token * a.token_step
                ends = c.var((token + 1).equals(a.n_tokens).zext(I64))
                with c.when(token + 1 - first.value >= room):
                    ends.value = c.i64(1)
                with c.when(ends.value.equals(0)), c.when(_alike(c, row, row + a.token_step, a.n_words).equals(0)):
                    ends.value = c.i64(1)
                with c.when(ends.value.differs(0)):
                    _write(c, a, stream, first.value, token + 1, n, totals, divided=divided)
                    first.value = token + 1
        c.store(a.tiles + Tile.COUNT, n.value)
        c.store(a.tiles + Tile.HEADS, heads)
        c.store(a.tiles + Tile.KEY_HEADS, c.select(heads < a.group, c.i64(1), _key_heads(c, a, totals)))


class _TileTotals(NamedTuple):
    """Of all tiles: the most tokens, the blocks of the longest unit for one key head, and the blocks of all of them for
    all tokens.
    """

    tokens: Var
    longest: Var
    total: Var


def _key_heads(c: Code, a: SimpleNamespace, totals: _TileTotals) -> Value:
    """Key heads per unit of work: as many as keep the wait for the last thread short, in equal parts."""
    even = totals.total.value * a.n_heads_kv // c.max(totals.longest.value * (a.threads - 1) * _EVEN, c.i64(1))
    room = c.min(a.n_heads_kv, a.most // (totals.tokens.value * a.group))
    sets: Value = (a.n_heads_kv - 1) // c.max(c.min(even, room), c.i64(1)) + 1
    together: Value = (a.n_heads_kv + (sets - 1)) // sets
    return together


def _segments(c: Code, a: SimpleNamespace, row: Value, mask: Value, *, masked: bool) -> None:
    """Fill in a row's record except its bitmap."""
    starts = MaskRow.starts(row, a.n_words)
    seen, end = c.var(c.i64(0)), c.var(c.i64(0))
    with c.range(0, a.n_words) as word:
        bits = c.load(I64, row + MaskRow.BITS + word * 8)
        with c.when(bits.differs(0)):
            after = seen.value + c.count_ones(bits)
            number = (seen.value + (SEGMENT - 1)) // SEGMENT  # number of the next segment to begin
            with c.when(number * SEGMENT < after):
                rest = c.var(bits)
                with c.range(seen.value, number * SEGMENT):
                    rest.value = rest.value & (rest.value - 1)
                c.store(starts + number * 4, (word * WORD + c.lowest_one(rest.value)).to(I32))
            seen.value, end.value = after, word * WORD + c.highest_one(bits) + 1
    n = (seen.value + (SEGMENT - 1)) // SEGMENT
    c.store(starts + n * 4, end.value.to(I32))
    last = c.var(c.min(end.value * BLOCK, a.n_kv))
    if masked:
        with c.when(n > 0), c.loop() as loop:
            c.leave(loop, c.load(I16, mask + (last.value - 1) * 2).differs(_HIDDEN))
            last.value = last.value - 1
    c.store(row + MaskRow.LAST, last.value.to(I32))
    c.store(row + MaskRow.SEGMENTS, n.to(I32))


def _n_parts(c: Code, row: Value) -> Value:
    """Segments of a row; one if it sees nothing."""
    return c.max(c.load(I32, row + MaskRow.SEGMENTS).to(I64), c.i64(1))


def _n_seen(c: Code, row: Value, n_words: Value) -> Value:
    """Number of blocks that a row sees."""
    n = c.var(c.i64(0))
    with c.range(0, n_words) as word:
        n.value = n.value + c.count_ones(c.load(I64, row + MaskRow.BITS + word * 8))
    return n.value


def _alike(c: Code, one: Value, other: Value, n_words: Value) -> Value:
    """1 if two rows see more blocks in common than not, else 0."""
    common, all_ = c.var(c.i64(0)), c.var(c.i64(0))
    with c.range(0, n_words) as word:
        x, y = c.load(I64, one + MaskRow.BITS + word * 8), c.load(I64, other + MaskRow.BITS + word * 8)
        common.value = common.value + c.count_ones(x & y)
        all_.value = all_.value + c.count_ones(x | y)
    return (common.value * 2 >= all_.value).zext(I64)


def _write(
    c: Code, a: SimpleNamespace, stream: Value, first: Value, stop: Value, n: Var, totals: _TileTotals, *, divided: bool
) -> None:
    """Append the tile of the tokens from `first` to `stop`, or one for each of its segments."""
    most, seen = c.var(c.i64(1)), c.var(c.i64(0))
    with c.range(first, stop) as token:
        row = a.rows + stream * a.stream_step + token * a.token_step
        most.value = c.max(most.value, _n_parts(c, row))
        seen.value = c.max(seen.value, _n_seen(c, row, a.n_words))
    tokens = stop - first
    totals.tokens.value = c.max(totals.tokens.value, tokens)
    totals.total.value = totals.total.value + seen.value * tokens
    unit = c.min(seen.value, SEGMENT) if divided else seen.value
    totals.longest.value = c.max(totals.longest.value, unit * tokens)
    with c.range(0, most.value if divided else 1) as part:
        at = a.tiles + Tile.LIST + n.value * Tile.BYTES
        c.store(at + Tile.STREAM, stream)
        c.store(at + Tile.FIRST, first)
        c.store(at + Tile.TOKENS, stop - first)
        c.store(at + Tile.START, part)
        c.store(at + Tile.STOP, part + 1 if divided else most.value)
        n.value = n.value + 1
