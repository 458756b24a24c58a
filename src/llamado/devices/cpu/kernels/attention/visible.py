"""What each row of a mask sees, and which rows are taken together: found once per graph.

Cells are counted in blocks of `BLOCK`; of a row it is known which blocks it sees at all (a bitmap), and where the
segments begin into which they are divided: a segment is `SEGMENT` blocks *that the row sees*, counted from its first
one. So a token's segments are the same wherever its sequence lies, in however many pieces.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from llamado.devices.cpu.jit import kernel
from llamado.devices.cpu.simd import I16, I32, I64, Code, I16x32, Value, Var, Work

BLOCK = 32
"""Keys per block, the same for every kernel and batch size: it decides where the running maximum moves."""
SEGMENT = 64
"""Blocks per segment, the same everywhere too: results of segments are put together one after the other."""
WORD = 64
"""Blocks in a word of a bitmap."""

_EVEN = 4
"""Of what a thread has to do, the part by which the last unit of work may keep the others waiting."""

_HIDDEN = -1024
"""0xFC00: −inf in f16."""


class MaskRow:
    """What is known of a row of the mask, in bytes: one past the last cell it sees and how many segments it has (i32),
    its bitmap (i64), the blocks that its segments begin with and, behind them, one past the last (i32).
    """

    LAST, SEGMENTS, BITS = 0, 4, 8

    @staticmethod
    def starts(row: Value, n_words: Value) -> Value:
        return row + MaskRow.BITS + n_words * 8

    @staticmethod
    def bytes(n_words: int) -> int:
        return MaskRow.BITS + 8 * n_words + (4 * (n_words + 1) + 7) // 8 * 8


def words_of(n_kv: int) -> int:
    """Words of a row's bitmap; as many segments it can have."""
    return max(1, -(-n_kv // (BLOCK * WORD)))


class Tile:
    """Tokens that are taken together, in i64: their stream, the first one, how many, the first segment and the last
    one + 1. The list of them begins with how many there are, how many heads of a group are taken at once, and how many
    key heads.
    """

    STREAM, FIRST, TOKENS, START, STOP = 0, 8, 16, 24, 32
    BYTES = 40
    COUNT, HEADS, KEY_HEADS, LIST = 0, 8, 16, 24


@kernel("mask", "nb1", "n_kv", "n_words", "n_rows", "rows", "row_step")
def visible_blocks(c: Code, a: SimpleNamespace, work: Work, *, masked: bool) -> None:
    """For each row of an f16 mask (one row that sees everything where there is none) the bitmap of its blocks."""
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
    """The bits below bit n of a word, for any n."""
    inside = c.min(c.select(n < 0, c.i64(0), n), 63)
    return c.select(n > 63, c.i64(-1), (c.i64(1) << inside) - 1)


@kernel(
    "mask", "nb1", "n_kv", "n_words", "n_rows", "rows", "row_step", "token_step", "stream_step",
    "n_tokens", "n_streams", "n_heads_kv", "group", "most", "units", "threads", "tiles",
)  # fmt: skip
def find_tiles(c: Code, a: SimpleNamespace, work: Work, *, masked: bool, divided: bool) -> None:
    """Where the segments of every row begin; and tiles: neighbours that see much the same share what is read of it.

    A tile has at most `most` queries, and there are `units` of work if the tokens give as many. `divided`: every
    segment of a tile is a unit of its own. `token_step`, `stream_step`: bytes from the row of one token, or stream, to
    the next one's. Writes one list, so one thread does it.
    """
    with c.shares(work, c.i64(1), c.i64(1)):
        with c.range(0, a.n_rows) as number:
            _segments(c, a, a.rows + number * a.row_step, a.mask + number * a.nb1, masked=masked)
        parts = c.var(c.i64(0))  # units that there would be, were every token a tile and every head alone
        with c.range(0, a.n_streams) as stream, c.range(0, a.n_tokens) as token:
            row = a.rows + stream * a.stream_step + token * a.token_step
            parts.value = parts.value + (_n_parts(c, row) if divided else 1)
        parts.value = parts.value * a.n_heads_kv
        pieces = c.var((a.group + (a.most - 1)) // a.most)  # that a group of heads is cut into
        needed = (a.threads + parts.value - 1) // parts.value
        pieces.value = c.min(a.group, c.max(pieces.value, needed))
        heads = (a.group + pieces.value - 1) // pieces.value
        share = c.max(parts.value // a.units, c.i64(1))
        room = c.min(share, a.most // heads)
        n, tiled = c.var(c.i64(0)), _Tiled(*(c.var(c.i64(1)) for _ in _Tiled._fields))
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
                    _write(c, a, stream, first.value, token + 1, n, tiled, divided=divided)
                    first.value = token + 1
        c.store(a.tiles + Tile.COUNT, n.value)
        c.store(a.tiles + Tile.HEADS, heads)
        c.store(a.tiles + Tile.KEY_HEADS, c.select(heads < a.group, c.i64(1), _key_heads(c, a, tiled)))


class _Tiled(NamedTuple):
    """Of all tiles: the most tokens, blocks of the longest unit for one key head and of all of them, for all tokens."""

    tokens: Var
    longest: Var
    total: Var


def _key_heads(c: Code, a: SimpleNamespace, tiled: _Tiled) -> Value:
    """How many key heads a unit of work has: so many that no thread waits long for the last one, and in equal parts."""
    even = tiled.total.value * a.n_heads_kv // c.max(tiled.longest.value * (a.threads - 1) * _EVEN, c.i64(1))
    room = c.min(a.n_heads_kv, a.most // (tiled.tokens.value * a.group))
    sets: Value = (a.n_heads_kv - 1) // c.max(c.min(even, room), c.i64(1)) + 1
    together: Value = (a.n_heads_kv + (sets - 1)) // sets
    return together


def _segments(c: Code, a: SimpleNamespace, row: Value, mask: Value, *, masked: bool) -> None:
    """Fills in all of a row but its bitmap."""
    starts = MaskRow.starts(row, a.n_words)
    seen, end = c.var(c.i64(0)), c.var(c.i64(0))
    with c.range(0, a.n_words) as word:
        bits = c.load(I64, row + MaskRow.BITS + word * 8)
        with c.when(bits.differs(0)):
            after = seen.value + c.count_ones(bits)
            number = (seen.value + (SEGMENT - 1)) // SEGMENT  # of the next segment to begin
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
    """Segments of a row; one where it sees nothing."""
    return c.max(c.load(I32, row + MaskRow.SEGMENTS).to(I64), c.i64(1))


def _n_seen(c: Code, row: Value, n_words: Value) -> Value:
    """Blocks that a row sees."""
    n = c.var(c.i64(0))
    with c.range(0, n_words) as word:
        n.value = n.value + c.count_ones(c.load(I64, row + MaskRow.BITS + word * 8))
    return n.value


def _alike(c: Code, one: Value, other: Value, n_words: Value) -> Value:
    """1 where two rows see more blocks in common than not, else 0."""
    common, all_ = c.var(c.i64(0)), c.var(c.i64(0))
    with c.range(0, n_words) as word:
        x, y = c.load(I64, one + MaskRow.BITS + word * 8), c.load(I64, other + MaskRow.BITS + word * 8)
        common.value = common.value + c.count_ones(x & y)
        all_.value = all_.value + c.count_ones(x | y)
    return (common.value * 2 >= all_.value).zext(I64)


def _write(
    c: Code, a: SimpleNamespace, stream: Value, first: Value, stop: Value, n: Var, tiled: _Tiled, *, divided: bool
) -> None:
    """Appends the tile of the tokens from `first` to `stop`, or one for each of its segments."""
    most, seen = c.var(c.i64(1)), c.var(c.i64(0))
    with c.range(first, stop) as token:
        row = a.rows + stream * a.stream_step + token * a.token_step
        most.value = c.max(most.value, _n_parts(c, row))
        seen.value = c.max(seen.value, _n_seen(c, row, a.n_words))
    tokens = stop - first
    tiled.tokens.value = c.max(tiled.tokens.value, tokens)
    tiled.total.value = tiled.total.value + seen.value * tokens
    unit = c.min(seen.value, SEGMENT) if divided else seen.value
    tiled.longest.value = c.max(tiled.longest.value, unit * tokens)
    with c.range(0, most.value if divided else 1) as part:
        at = a.tiles + Tile.LIST + n.value * Tile.BYTES
        c.store(at + Tile.STREAM, stream)
        c.store(at + Tile.FIRST, first)
        c.store(at + Tile.TOKENS, stop - first)
        c.store(at + Tile.START, part)
        c.store(at + Tile.STOP, part + 1 if divided else most.value)
        n.value = n.value + 1
