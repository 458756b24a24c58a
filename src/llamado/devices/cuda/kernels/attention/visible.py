"""Visible key blocks of each mask row: once per graph, a block of threads for each row."""

from __future__ import annotations

from types import SimpleNamespace

from llamado.devices.cuda.kernel import kernel
from llamado.devices.cuda.simt import WARP, Register, SimtCode
from llamado.devices.kernels.attention.visible import BLOCK, SEGMENT, WORD
from llamado.devices.simd import I16, I32, I64

THREADS = 256

_HIDDEN = -1024
"""0xFC00: −inf in f16."""
_BOTH_HIDDEN = -(0x03FF_0400)
"""0xFC00FC00: two of them."""


class VisibleRow:
    """Byte offsets of a mask row's record: the number of visible blocks (i32), their bitmap (i64), and their numbers in
    order (i32). Numbers from `SEGMENT`·s on are segment s.
    """

    COUNT, BITS = 0, 8

    @staticmethod
    def numbers(row: Register, n_words: Register) -> Register:
        return row + VisibleRow.BITS + n_words * 8

    @staticmethod
    def bytes(n_words: int) -> int:
        return VisibleRow.BITS + n_words * (8 + 4 * WORD)


assert SEGMENT == WORD  # a bitmap of n words has at most n segments


@kernel("mask", "mask_row", "n_kv", "n_words", "rows", "row_step")
def find_visible(c: SimtCode, a: SimpleNamespace, *, masked: bool, wide: bool) -> None:
    """Store the record of each row of an f16 mask (without mask: one row that sees everything).

    `wide`: rows are aligned to 16 bytes, and their cells are a multiple of eight.
    """
    thread, number = c.thread(), c.block().to(I64)
    lane, warp = thread & (WARP - 1), thread // WARP
    row, mask = a.rows + number * a.row_step, a.mask + number * a.mask_row
    n_kv, counts = a.n_kv.to(I32), c.shared()
    seen = c.var(c.i32(0))
    with c.range(0, a.n_words.to(I32) * WORD, THREADS) as first:
        block = first + thread
        sees = c.var(c.i32(0))
        with c.when(block * BLOCK < n_kv):
            sees.value = _sees(c, mask, block * BLOCK, n_kv, wide=wide) if masked else c.i32(1)
        bits = sees.value << lane
        for distance in (16, 8, 4, 2, 1):
            bits = bits | c.shuffle_xor(bits, distance)
        with c.when(lane.equals(0)):
            c.store(counts + warp * 4, c.function("ctpop", bits))
            with c.when(block < a.n_words.to(I32) * WORD):
                c.store(row + VisibleRow.BITS + (block // 8).to(I64), bits)
        c.barrier()
        place = seen.value + c.function("ctpop", bits & ((c.i32(1) << lane) - 1))
        for other in range(THREADS // WARP):
            n = c.load(I32, counts + 4 * other)
            place = place + c.select(warp > other, n, c.i32(0))
            seen.value = seen.value + n
        c.barrier()
        with c.when(sees.value.differs(0)):
            c.store(VisibleRow.numbers(row, a.n_words) + place.to(I64) * 4, block)
    with c.when(thread.equals(0)):
        c.store(row + VisibleRow.COUNT, seen.value)


SHARED_BYTES = 4 * (THREADS // WARP)
"""Shared memory of `find_visible`."""


def _sees(c: SimtCode, mask: Register, first: Register, n_kv: Register, *, wide: bool) -> Register:
    """1 if a row sees one of the `BLOCK` cells from `first` on, else 0. Loads do not wait for each other."""
    sees, step = c.i32(0), 8 if wide else 1
    for i in range(0, BLOCK, step):
        inside = (first + i < n_kv).zext(I32)
        at = mask + c.min(first + i, n_kv - step).to(I64) * 2
        shown = (
            [word.differs(_BOTH_HIDDEN) for word in c.load_words(at, 4)] if wide else [c.load(I16, at).differs(_HIDDEN)]
        )
        for one in shown:
            sees = sees | (one.zext(I32) & inside)
    return sees
