"""Matrix products of experts: each token's activations times the matrices chosen for it.

The arithmetic is that of `matmul.py` and `floats.py`, so a product has the same bits as one with the expert's matrix
alone, independent of other tokens. `routes` lists the columns of each expert, so that its rows are read once for all of
them. A slot is one choice of one token, number token · n_used + i; it is a row of the result.

Columns are groups of one (see `activations.py`), one for each token or for each slot: `x_token` and `x_slot` are the
bytes from one to the next, and the other of them is 0. Invalid expert numbers count as the first expert.

The table of routes: i64 n, the number of chosen experts; from HEAD on 16 bytes for each of them (i32 expert, i32 first,
i32 count); after the room for all experts 8 bytes for each slot, ordered by expert (i32 slot, i32 token).
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llamado.devices.kernel import kernel
from llamado.devices.kernels.floats import COLUMNS, ROWS, dot_rows
from llamado.devices.kernels.formats import FORMATS, in_blocks
from llamado.devices.kernels.matmul import (
    STRETCH,
    RowPanel,
    ScatteredColumns,
    add_panel,
    products,
    slots,
    unpack,
)
from llamado.devices.simd import I32, I64, Code, I32x8, Type, Value, Work
from llamado.gguf.types import TensorType

_Number = TypeVar("_Number", int, Value)

HEAD, CHOSEN_BYTES, SLOT_BYTES = 64, 16, 8

CHOICES = ("ids", "id0", "id1", "n_used", "n_experts")
MATRICES = ("w", "row_bytes", "expert_bytes", "n_rows", "x", "y", "y_stride", "share")


_WIDE = 32
"""Choices that a group of a team looks at together."""
_I32x32 = Type("i32", _WIDE)


def counts_bytes(n_experts: int, n_slots: int) -> int:
    """Scratch bytes of `group_by_expert`."""
    return 4 * (_whole(n_experts) + _whole(n_slots))


def _whole(n: _Number) -> _Number:
    return (n + (_WIDE - 1)) // _WIDE * _WIDE


def routes_bytes(n_experts: int, n_slots: int) -> int:
    """Bytes of a table of routes."""
    return HEAD + CHOSEN_BYTES * n_experts + SLOT_BYTES * n_slots


@lru_cache(maxsize=64)
def routes(n: int, count: int) -> NDArray[np.uint8]:
    """Return the table of `n` matrices with `count` consecutive columns each."""
    chosen, slots_ = np.zeros((n, CHOSEN_BYTES // 4), np.int32), np.arange(n * count, dtype=np.int32)
    chosen[:, 0], chosen[:, 1], chosen[:, 2] = np.arange(n), np.arange(n) * count, count
    head = np.zeros(HEAD, np.uint8)
    head[:8] = np.array([n], np.int64).view(np.uint8)
    order = np.repeat(slots_, SLOT_BYTES // 4)
    return np.concatenate([head, chosen.reshape(-1).view(np.uint8), order.view(np.uint8)])


def expert_of(c: Code, a: SimpleNamespace, token: Value, i: Value) -> Value:
    """Return the number of the expert that is a token's choice i."""
    id_ = c.load(I32, a.ids + token * a.id1 + i * a.id0).to(I64)
    return c.select((id_ >= 0) & (id_ < a.n_experts), id_, c.i64(0))


@kernel(*CHOICES, "n_tokens", "counts", "routes")
def group_by_expert(c: Code, a: SimpleNamespace, work: Work, *, by_team: bool = False) -> None:
    """Build the table of routes, with ascending slots per expert. `counts`: scratch of `counts_bytes`. `by_team`: look
    for the slots of all experts at once.
    """
    if by_team:
        _group_by_team(c, a, work)
        return
    order = a.routes + HEAD + a.n_experts * CHOSEN_BYTES
    with c.shares(work, c.i64(1), c.i64(1)):
        with c.range(0, a.n_experts) as e:
            c.store(a.counts + e * 4, c.const(I32, 0))
        with c.range(0, a.n_tokens) as token, c.range(0, a.n_used) as i:
            at = a.counts + expert_of(c, a, token, i) * 4
            c.store(at, c.load(I32, at) + 1)
        n, first = c.var(c.i64(0)), c.var(c.const(I32, 0))
        with c.range(0, a.n_experts) as e:
            count = c.load(I32, a.counts + e * 4)
            c.store(a.counts + e * 4, first.value)
            with c.when(count > 0):
                at = a.routes + HEAD + n.value * CHOSEN_BYTES
                for word, number in enumerate((e.to(I32), first.value, count)):
                    c.store(at + 4 * word, number)
                n.value = n.value + 1
            first.value = first.value + count
        c.store(a.routes, n.value)
        with c.range(0, a.n_tokens) as token, c.range(0, a.n_used) as i:
            at = a.counts + expert_of(c, a, token, i) * 4
            place = c.load(I32, at)
            c.store(at, place + 1)
            to = order + place.to(I64) * SLOT_BYTES
            c.store(to, (token * a.n_used + i).to(I32))
            c.store(to + 4, token.to(I32))


def _group_by_team(c: Code, a: SimpleNamespace, work: Work) -> None:
    n_slots = a.n_tokens * a.n_used
    whole_experts, whole_slots = _whole(a.n_experts), _whole(n_slots)
    choices, zero = a.counts + whole_experts * 4, c.const(I32, 0)
    with c.shares(work, c.i64(1), c.i64(1)):
        with c.singles(0, whole_slots) as slot:
            one = c.min(slot, n_slots - 1)
            expert = expert_of(c, a, one // a.n_used, one % a.n_used).to(I32)
            c.store(choices + slot * 4, c.select(slot < n_slots, expert, c.const(I32, -1)))
        with c.singles(a.n_experts, whole_experts) as e:
            c.store(a.counts + e * 4, zero)
        c.join()
        with c.each(0, a.n_experts) as e:
            own, counts = e.to(I32).splat(8), c.var(c.const(I32x8, 0))
            with c.range(0, whole_slots, _WIDE) as slot:
                for part in range(0, _WIDE, 8):
                    chosen = c.load(I32x8, choices + slot * 4 + 4 * part, 4)
                    counts.value = counts.value + c.select(chosen.equals(own), c.const(I32x8, 1), c.const(I32x8, 0))
            c.store(a.counts + e * 4, c.sum_lanes(counts.value))
        c.join()
        with c.each(0, a.n_experts) as e:
            count, number, first = c.load(I32, a.counts + e * 4), *_experts_before(c, a.counts, e)
            with c.when((e + 1).equals(a.n_experts)):
                c.store(a.routes, (number + c.select(count > 0, c.const(I32, 1), zero)).to(I64))
            with c.when(count > 0):
                at = a.routes + HEAD + number.to(I64) * CHOSEN_BYTES
                for word, value in enumerate((e.to(I32), first, count)):
                    c.store(at + 4 * word, value)
                order = a.routes + HEAD + a.n_experts * CHOSEN_BYTES + first.to(I64) * SLOT_BYTES
                _list_slots(c, e, choices, whole_slots, a.n_used, order)
        c.join()


def _experts_before(c: Code, counts: Value, expert: Value) -> tuple[Value, Value]:
    """Return the number of chosen experts before one, and of their slots."""
    chosen, slots_, none = c.var(c.const(I32x8, 0)), c.var(c.const(I32x8, 0)), c.const(I32x8, 0)
    with c.range(0, expert, 8) as i:
        before = c.const(I32x8, list(range(8))) < (expert - i).to(I32).splat(8)
        count = c.select(before, c.load(I32x8, counts + i * 4, 4), none)
        chosen.value = chosen.value + c.select(count > 0, c.const(I32x8, 1), none)
        slots_.value = slots_.value + count
    return c.sum_lanes(chosen.value), c.sum_lanes(slots_.value)


def _list_slots(c: Code, expert: Value, choices: Value, n: Value, n_used: Value, order: Value) -> None:
    """Store the slots and tokens of an expert at `order`."""
    at, own = c.var(order), expert.to(I32).splat(_WIDE)
    with c.range(0, n, _WIDE) as first:
        found = c.var(c.load(_I32x32, choices + first * 4, 4).equals(own).bits(I32).zext(I64))
        with c.loop() as loop:
            c.leave(loop, found.value.equals(0))
            slot = first + c.lowest_one(found.value)
            c.store(at.value, slot.to(I32))
            c.store(at.value + 4, (slot // n_used).to(I32))
            found.value, at.value = found.value & (found.value - 1), at.value + SLOT_BYTES


@kernel(*MATRICES, "x_slot", "n_blocks", *CHOICES)
def experts_one(c: Code, a: SimpleNamespace, work: Work, *, weights: str, near: bool, panel_rows: int) -> None:
    """y for one token: the rows of its experts one after the other, like `matmul_few`."""
    form = in_blocks(TensorType[weights])
    panels = (a.n_rows + (panel_rows - 1)) // panel_rows
    with c.shares(work, a.n_used * panels, a.share) as unit:
        i, number = unit // panels, unit % panels
        first = c.min(number * panel_rows, a.n_rows - panel_rows)
        panel = _panel(c, a, expert_of(c, a, c.i64(0), i), first, panel_rows)
        (total,) = products(c, form, a.n_blocks, panel, [ScatteredColumns([a.x + i * a.x_slot])], near)
        c.store(a.y + i * a.y_stride + first * 4, total.value)


def _panel(c: Code, a: SimpleNamespace, expert: Value, first: Value, n: int) -> RowPanel:
    """`n` rows of an expert."""
    return RowPanel(c, a.w + expert * a.expert_bytes + first * a.row_bytes, a.row_bytes, n)


class ChosenExpert(NamedTuple):
    """The columns of a chosen expert: `n`, from slot `first` of the table on, which is at `order`."""

    expert: Value
    first: Value
    n: Value
    order: Value


def chosen_at(c: Code, a: SimpleNamespace, number: Value) -> ChosenExpert:
    at = a.routes + HEAD + number * CHOSEN_BYTES
    expert, first, count = (c.load(I32, at + 4 * i).to(I64) for i in range(3))
    return ChosenExpert(expert, first, count, a.routes + HEAD + a.n_experts * CHOSEN_BYTES + first * SLOT_BYTES)


def slot_and_token(c: Code, found: ChosenExpert, column: Value) -> tuple[Value, Value]:
    """Return the slot and the token of one of an expert's columns."""
    at = found.order + column * SLOT_BYTES
    return c.load(I32, at).to(I64), c.load(I32, at + 4).to(I64)


@kernel(*MATRICES, "x_slot", "x_token", "n_blocks", "n_experts", "routes")
def experts_many(
    c: Code, a: SimpleNamespace, work: Work, *, weights: str, panel_rows: int, most: int | None = None
) -> None:
    """y for any number of tokens. `panel_rows`, 8 or 16: rows that a thread takes at a time.

    Few columns of an expert are multiplied like `matmul_few`, more like `matmul_many`. `most`: experts with more
    columns are left to `tiles/experts.py`.
    """
    form = in_blocks(TensorType[weights])
    per_column, wide = form.column_bytes, c.lowering.columns
    size = 4 * panel_rows * slots(form)
    stretch = STRETCH * 8 // panel_rows // form.block
    scratch, nowhere = c.scratch(stretch * size), c.scratch(4 * panel_rows)

    def group(found: ChosenExpert, column: Value, first: Value, n: int) -> tuple[ScatteredColumns, list[Value]]:
        """Return n columns, and the target addresses of their products."""
        xs, targets = [], []
        for j in range(n):
            slot, token = slot_and_token(c, found, c.min(column + j, found.n - 1))
            xs.append(a.x + slot * a.x_slot + token * a.x_token)
            targets.append(c.select(column + j < found.n, a.y + slot * a.y_stride + first * 4, nowhere))
        return ScatteredColumns(xs), targets

    def few(found: ChosenExpert, first: Value, n: int) -> None:
        """Multiply a panel's rows with up to n columns."""
        x, targets = group(found, c.i64(0), first, n)
        here = _panel(c, a, found.expert, first, panel_rows)
        for target, total in zip(targets, products(c, form, a.n_blocks, here, [x], False), strict=True):
            c.store(target, total.value)

    def panel(found: ChosenExpert, first: Value) -> None:
        """Multiply a panel's rows with many columns; sums are kept in y from one stretch to the next."""
        here = _panel(c, a, found.expert, first, panel_rows)
        n_wide, rest = found.n // wide, found.n % wide
        if wide > 4:
            n_wide = n_wide + (rest > 4).zext(I64)
        with c.range(0, a.n_blocks, stretch) as start:
            blocks = c.min(a.n_blocks - start, stretch)
            with c.range(0, blocks) as i:
                unpack(c, form, here.block(start + i, form.block_bytes), scratch + i * size)

            def columns(column: Value, n: int) -> None:
                x, targets = group(found, column, first, n)
                add_panel(c, form, scratch, blocks, x.from_byte(start * per_column), targets, start > 0, panel_rows)

            with c.range(0, n_wide) as group_number:
                columns(group_number * wide, wide)
            with c.when(n_wide * wide < found.n):
                columns(n_wide * wide, min(wide, 4))

    # as in `matmul_many`, one thread does the last two panels if they share rows
    panels = a.n_rows // panel_rows
    with c.shares(work, c.load(I64, a.routes) * panels, a.share) as unit:
        found = chosen_at(c, a, unit // panels)
        number = unit % panels
        start = number * panel_rows
        stop = c.select((number + 1).equals(panels), a.n_rows, start + panel_rows)
        below = 0
        for upto in sorted({1, min(wide, 4), wide}):
            with c.when((found.n > below) & (found.n <= upto)), c.range(start, stop, panel_rows) as first:
                few(found, c.min(first, a.n_rows - panel_rows), upto)
            below = upto
        many = found.n > wide if most is None else (found.n > wide) & (found.n <= most)
        with c.when(many), c.range(start, stop, panel_rows) as first:
            panel(found, c.min(first, a.n_rows - panel_rows))


@kernel(*MATRICES, "n", "x1", "x_used", "n_experts", "routes")
def experts_float(c: Code, a: SimpleNamespace, work: Work, *, weights: str) -> None:
    """y for experts of plain floats, like `matmul_float`. x has rows of f32, `x_used` of them for each token."""
    form = FORMATS[TensorType[weights]]
    quads = (a.n_rows + (ROWS - 1)) // ROWS
    with c.shares(work, c.load(I64, a.routes) * quads, a.share) as unit:
        found, quad = chosen_at(c, a, unit // quads), unit % quads
        numbers = [c.min(quad * ROWS + r, a.n_rows - 1) for r in range(ROWS)]
        rows = [a.w + found.expert * a.expert_bytes + number * a.row_bytes for number in numbers]
        with c.range(0, found.n, COLUMNS) as column:
            places = [found.order + c.min(column + j, found.n - 1) * SLOT_BYTES for j in range(COLUMNS)]
            slots_ = [c.load(I32, at).to(I64) for at in places]
            tokens = [c.load(I32, at + 4).to(I64) for at in places]
            xs = [a.x + (t * a.x_used + s % a.x_used) * a.x1 for s, t in zip(slots_, tokens, strict=True)]
            for number, totals in zip(numbers, dot_rows(c, form, rows, xs, a.n), strict=True):
                for slot, total in zip(slots_, totals, strict=True):
                    c.store(a.y + slot * a.y_stride + number * 4, total)
