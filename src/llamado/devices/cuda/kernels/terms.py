"""The terms that a unit of 256 weights of one row adds to its products, computed by one thread.

Integer sums are exact, so any thread may compute them. What must keep its order is the chain of fused multiply-adds
along K: a thread returns the factors (a, b) of each of them, and the caller adds a·b in order. The arithmetic is that
of `devices/kernels/matmul.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llamado.devices.cuda.lanes import LaneCode
from llamado.devices.cuda.panel import ThreadPanel, ThreadWords, of_thread, register_of
from llamado.devices.cuda.simt import Register
from llamado.devices.kernels import activations as acts
from llamado.devices.kernels.activations import UNIT
from llamado.devices.kernels.formats.format import Block32, Blocks32, Blocks256
from llamado.devices.kernels.matmul import scaled256, terms32
from llamado.devices.simd import F32, I16, I32, Value

Form = Blocks32 | Blocks256


class Term(NamedTuple):
    """The factors of one fused multiply-add, and the number of its 32 weights in the unit."""

    a: Register
    b: Register
    part: int = 0


def unit_bytes(form: Form) -> int:
    """Bytes of 256 weights."""
    return UNIT // form.block * form.block_bytes


def unit_terms(c: LaneCode, form: Form, words: ThreadWords, columns: Sequence[Register]) -> list[list[Term]]:
    """Return the terms of each column. `words`: the thread's unit of weights; `columns`: shared addresses of units of
    activations.
    """
    if isinstance(form, Blocks256):
        return [[term] for term in _of_super_block(c, form, words, columns)]
    found: list[list[Term]] = [[] for _ in columns]
    for number, block in parts32(c, form, words, range(UNIT // 32)):
        for terms, x in zip(found, columns, strict=True):
            terms += _of_block(c, form, block, x, number)
    return found


def parts32(c: LaneCode, form: Blocks32, words: ThreadWords, numbers: range) -> Iterator[tuple[int, Block32]]:
    """Yield blocks of 32 weights of a unit by their numbers, which begin and end with whole blocks of the format."""
    for first in range(numbers.start, numbers.stop, form.n_parts):
        panel = ThreadPanel(c, words, first // form.n_parts * form.block_bytes)
        yield from enumerate(form.unpack(c, panel), first)


def _numbers(c: LaneCode, x: Register, at: int, n: int) -> list[Register]:
    """n words of a unit of activations from byte `at` on, which is a multiple of 16."""
    return [word for i in range(0, n, 4) for word in c.simt.load_words(x + (at + 4 * i), 4)]


def _dot(c: LaneCode, weights: Sequence[Value], x: Sequence[Register], total: Register) -> Register:
    for group, word in zip(weights, x, strict=True):
        total = c.simt.dot4(register_of(group), word, total, signed=True)
    return total


def _of_block(c: LaneCode, form: Blocks32, block: Block32, x: Register, number: int) -> Iterator[Term]:
    simt, zero, groups = c.simt, form.zero(c.lowering), block.groups
    numbers, nothing = _numbers(c, x, 32 * number, 8), simt.i32(0)
    if block.d_high is None:
        if zero:
            nothing = simt.load(I16, x + (acts.UNIT_MINUS_SUM + 2 * number)).to(I32) * zero
        found = [(_dot(c, groups, numbers, nothing), block.d)]
    else:
        halves = [(groups[:4], numbers[:4], block.d), (groups[4:], numbers[4:], block.d_high)]
        minus = [c.const(groups[0].type, -zero)] * 4  # the sums of halves are not stored
        zeros = [_dot(c, minus, own, nothing) if zero else nothing for _, own, _ in halves]
        found = [(_dot(c, w, own, start), d) for (w, own, d), start in zip(halves, zeros, strict=True)]
    d = of_thread(c, simt.load(F32, x + (acts.UNIT_D + 4 * number)))
    d_sum = None if block.m is None else of_thread(c, simt.load(F32, x + (acts.UNIT_D_SUM + 4 * number)))
    sums = [(of_thread(c, total), own) for total, own in found]
    for a, b in terms32(sums, block.m, d, d_sum):
        yield Term(register_of(a), register_of(b), number)


def _of_super_block(c: LaneCode, form: Blocks256, words: ThreadWords, columns: Sequence[Register]) -> Iterator[Term]:
    simt, zero = c.simt, form.zero(c.lowering)
    block = form.unpack(c, ThreadPanel(c, words, 0))
    nothing = simt.i32(0)
    totals = [nothing] * len(columns)
    for number, (groups, scale) in enumerate(block.parts):
        for j, x in enumerate(columns):
            numbers = _numbers(c, x, form.part * number, len(groups))
            if scale is None:
                totals[j] = _dot(c, groups, numbers, totals[j])
            else:
                totals[j] = totals[j] + _dot(c, groups, numbers, nothing) * register_of(scale)
    pairs = block.pairs if form.has_min or zero else []
    sums_at = acts.UNIT_SUMS_OF_16 if form.part == 16 else acts.UNIT_SUMS_OF_32
    for total, x in zip(totals, columns, strict=True):
        mins = nothing
        for pair, sums in zip(pairs, _numbers(c, x, sums_at, len(pairs)), strict=True):
            word = register_of(pair)
            mins = mins + _low(word) * _low(sums) + word.sar(16) * sums.sar(16)
        a = scaled256(block, of_thread(c, total), of_thread(c, mins), zero)
        yield Term(register_of(a), simt.load(F32, x + acts.UNIT_D_256))


def _low(word: Register) -> Register:
    """The signed lower half of a word."""
    return (word << 16).sar(16)
