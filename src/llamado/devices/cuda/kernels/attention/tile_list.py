"""Tiles of tokens: neighbors that see mostly the same cells share their loads."""

from __future__ import annotations

from types import SimpleNamespace

from llamado.devices.cuda.kernel import kernel
from llamado.devices.cuda.kernels.attention.visible import VisibleRow
from llamado.devices.cuda.simt import Register, SimtCode
from llamado.devices.simd import I32, I64

THREADS = 256
SHARED_BYTES = 4 * THREADS
"""Shared memory of `form_tiles`."""


class TileList:
    """Byte offsets of the list of tiles: their number, and for each its stream, first token and number of tokens
    (i32).
    """

    COUNT, LIST = 0, 4
    BYTES = 12

    @staticmethod
    def bytes(n_tokens: int) -> int:
        return TileList.LIST + TileList.BYTES * n_tokens


@kernel("rows", "row_token", "row_stream", "n_words", "n_tokens", "n_streams", "most", "tiles")
def form_tiles(c: SimtCode, a: SimpleNamespace) -> None:
    """List tiles of at most `most` neighboring tokens, each of which sees mostly the same cells as the one before it.

    One block of threads: they compare tokens side by side, and the first one writes the list.
    """
    thread, alike, n_tokens = c.thread(), c.shared(), a.n_tokens.to(I32)
    n, begin = c.var(c.i32(0)), c.var(c.i32(0))
    with c.range(c.i32(0), a.n_streams.to(I32)) as stream:
        begin.value = c.i32(0)
        with c.range(c.i32(0), n_tokens, THREADS) as first:
            token = first + thread
            row = a.rows + stream.to(I64) * a.row_stream + token.to(I64) * a.row_token
            with c.when(token + 1 < n_tokens):
                c.store(alike + thread * 4, _alike(c, row, row + a.row_token, a.n_words))
            with c.when((token + 1).equals(n_tokens)):
                c.store(alike + thread * 4, c.i32(0))
            c.barrier()
            with c.when(thread.equals(0)), c.range(first, c.min(first + THREADS, n_tokens)) as last:
                tokens = last + 1 - begin.value
                goes_on = c.load(I32, alike + (last - first) * 4).differs(0) & (tokens < a.most.to(I32))
                with c.when(goes_on ^ 1):
                    at = a.tiles + n.value.to(I64) * TileList.BYTES + TileList.LIST
                    for i, number in enumerate((stream, begin.value, tokens)):
                        c.store(at + 4 * i, number)
                    n.value, begin.value = n.value + 1, last + 1
            c.barrier()
    with c.when(thread.equals(0)):
        c.store(a.tiles + TileList.COUNT, n.value)


def _alike(c: SimtCode, one: Register, other: Register, n_words: Register) -> Register:
    """1 if two rows see more blocks in common than not, else 0."""
    common, all_ = c.var(c.i64(0)), c.var(c.i64(0))
    with c.range(c.i64(0), n_words) as word:
        x, y = (c.load(I64, row + word * 8 + VisibleRow.BITS) for row in (one, other))
        common.value = common.value + c.function("ctpop", x & y)
        all_.value = all_.value + c.function("ctpop", x | y)
    return (common.value * 2 >= all_.value).zext(I32)
