"""Blocks of keys and values in shared memory as f32, for a tile of queries."""

from __future__ import annotations

from typing import NamedTuple

from llamado.devices.cuda.kernels.attention.cells import CellFormat
from llamado.devices.cuda.kernels.functions import Functions
from llamado.devices.cuda.simt import WARP, Register, SimtCode
from llamado.devices.kernels.attention.visible import BLOCK
from llamado.devices.simd import I32, I64

KEY_STRIDE = 4 * (BLOCK + 4)
"""Bytes from one element of the keys to the next: the threads of a warp store to different banks."""

_EIGHT = 8


class HeadCells(NamedTuple):
    """Keys or values of one head in the cache: cell i at base + i·step."""

    form: CellFormat
    base: Register
    step: Register
    head: int
    n_kv: Register

    def cell(self, c: SimtCode, number: Register) -> Register:
        """The address of a cell; past the end, that of the last one."""
        return self.base + c.min(number, self.n_kv - 1).to(I64) * self.step


def place_of_key(key: Register) -> Register:
    """The place of a key among those of its block: a thread has keys i, i + 8, i + 16 and i + 24, side by side."""
    return key % _EIGHT * (BLOCK // _EIGHT) + key // _EIGHT


def store_keys(c: SimtCode, functions: Functions, keys: HeadCells, first: Register, to: Register, threads: int) -> None:
    """Store the block of keys from cell `first` on, transposed: element d of a key at d · KEY_STRIDE + 4 · place."""
    if not keys.form.direct:
        lane, group = c.thread() % _EIGHT, c.thread() // _EIGHT
        for key in range(0, BLOCK, threads // _EIGHT):
            cell = keys.cell(c, first + group + key)
            at = to + place_of_key(group + key) * 4
            for d in range(0, keys.head, _EIGHT):
                value = functions.load_eight(keys.form.type, cell, c.i64(d))
                c.store(at + (lane + d) * KEY_STRIDE, value)
        return
    own, warp = c.thread() % WARP, c.thread() // WARP
    cell = keys.cell(c, first + own) + (warp * (_EIGHT * keys.form.bytes)).to(I64)
    at = to + place_of_key(own) * 4 + warp * (_EIGHT * KEY_STRIDE)
    for d in range(0, keys.head, _EIGHT * (threads // WARP)):
        with c.when(warp * _EIGHT + d < keys.head):
            for i, value in enumerate(keys.form.load_eight(c, cell + d * keys.form.bytes)):
                c.store(at + (d + i) * KEY_STRIDE, value)


def load_values(c: SimtCode, values: HeadCells, first: Register, threads: int) -> list[Register]:
    """Return this thread's words of the block of values from cell `first` on, if they are plain numbers: they may be
    under way while something else is computed.
    """
    if not values.form.direct:
        return []
    lane, warp, of_row = c.thread() % WARP, c.thread() // WARP, _words_of_row(values)
    places = [c.min(lane + word, of_row - 1).to(I64) * 4 for word in range(0, of_row, WARP)]
    rows = [values.cell(c, first + warp + row) for row in range(0, BLOCK, threads // WARP)]
    return [c.load(I32, row + place) for row in rows for place in places]


def store_values(
    c: SimtCode, functions: Functions, values: HeadCells, words: list[Register], first: Register, to: Register,
    threads: int,
) -> Register:  # fmt: skip
    """Store the block of values from cell `first` on: element d of value k at to + 4 · (k · head + d). `words`: result
    of `load_values`. Return 0, or NaN if one of this thread's values is not finite.
    """
    check, row_bytes = c.f32(0.0), 4 * values.head
    if not values.form.direct:
        lane, group = c.thread() % _EIGHT, c.thread() // _EIGHT
        for key in range(0, BLOCK, threads // _EIGHT):
            cell = values.cell(c, first + group + key)
            at = to + group * row_bytes + lane * 4 + key * row_bytes
            for d in range(0, values.head, _EIGHT):
                value = functions.load_eight(values.form.type, cell, c.i64(d))
                c.store(at + d * 4, value)
                check = c.fma(value, c.f32(0.0), check)
        return check
    of_row = _words_of_row(values)
    lane, warp, of_word = c.thread() % WARP, c.thread() // WARP, values.head // of_row
    at, given = to + warp * row_bytes + lane * (4 * of_word), iter(words)
    for row in range(0, BLOCK, threads // WARP):
        for word in range(0, of_row, WARP):
            numbers = values.form.of_word(c, next(given))
            with c.when(lane + word < of_row):
                for i, value in enumerate(numbers):
                    c.store(at + (row * row_bytes + (word * of_word + i) * 4), value)
            for value in numbers:
                check = c.fma(value, c.f32(0.0), check)
    return check


def _words_of_row(values: HeadCells) -> int:
    return values.head * values.form.bytes // 4
