"""Batch planning: the slots of the next batch, the number of tokens of each, and their draft tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.engine.drafts.drafts import MOST, WINDOW, DraftManager, DraftRequest
from llamado.engine.forward.contract import Forward
from llamado.engine.media.stage import MediaStage
from llamado.engine.options import SchedulerOptions
from llamado.engine.scheduler.prefix import SequenceCache
from llamado.engine.scheduler.slots import BatchGroup, Slot, Task
from llamado.engine.scheduler.statistics import PACE_UNIT, Statistics
from llamado.models.memory import Handle, Span

_TOGETHER = 8
"""Most tokens of a sequence with states in a batch with draft tokens: batches of all sizes up to it are exact (see
Memory.place).
"""
_ENOUGH = 192
"""Prompt tokens in a batch from which on more make none of them noticeably cheaper."""
_PIECE = 32
"""Sizes of large batches are multiples of this."""
# most seconds of a step while some slot is generating
STEP_SECONDS = 0.15


class BatchShare(NamedTuple):
    """The part of one slot in a batch."""

    slot: Slot
    task: Task
    handle: Handle
    n: int
    row: int | None
    """Its (first) row of the logits."""
    draft: list[int]
    """Draft tokens behind those, each with a row of its own."""
    n_moves: int
    """Number of cell moves when it was started."""
    end: int
    """Tokens of the sequence up to its first row."""
    epoch: int
    """Epoch of the draft tokens when it was started (see PendingDraft)."""
    prompt_rows: slice = slice(0)
    """Rows of the logits of tokens of the prompt, except its last one."""

    @property
    def stale(self) -> bool:
        """True if its rows are of another sequence than the slot has now."""
        task = self.slot.task
        return task is not self.task or self.end != self.slot.length or (not self.n and self.epoch != task.ahead.epoch)


class ScheduledBatch(NamedTuple):
    """Arguments of `Forward.start`, and the slots they are for. The next batch overwrites the arrays."""

    tokens: NDArray[np.int32]
    spans: list[Span]
    outputs: NDArray[np.int32]
    group: BatchGroup
    shares: list[BatchShare]
    n_prompt: int
    embeddings: NDArray[np.float32] | None = None
    """Rows in place of the tokens, if these are of media."""


class Planner:
    """Chooses from the slots that have tokens to evaluate, and fills batches with them."""

    def __init__(
        self,
        forward: Forward,
        sequences: SequenceCache,
        stats: Statistics,
        options: SchedulerOptions,
        drafts: DraftManager | None,
        media: MediaStage,
    ) -> None:
        self._media = media
        self._forward = forward
        self._slots = sequences.slots
        self._sequence_cache = sequences
        self._stats = stats
        self._cont_batching = options.cont_batching
        self._max_batch = self.max_batch = max(1, min(options.n_batch, forward.max_batch))
        self._busy_batch = max(1, min(options.prefill_chunk, self._max_batch))
        self._turn = 0
        self._served: dict[BatchGroup, int] = {}  # number of the last batch of slots in the group, or of their arrival
        self._n_launched = 0
        self.n_generating = 0
        """Generating sequences, including those whose tokens are in flight."""
        self._drafts = drafts
        self.overlaps = False
        """True if batches take time in which others can follow."""
        # tokens of a generating sequence that may have to be read: its last one, and those behind a state that it went
        # back to because of wrong drafts
        self._behind = MOST if drafts is not None and forward.memory.has_states else 1
        self._tokens = np.zeros(self._max_batch, np.int32)

    # -- choosing ----------------------------------------------------------------------------------------------------

    def plan(self) -> tuple[list[Slot], list[int]]:
        """Return the slots of the next batch and the number of tokens of each, decoding ones first. Raises DeviceLost.

        Zero tokens of each: everything to evaluate is in flight, and only draft tokens can follow.
        """
        slots, counts = self._plan_next()
        return (slots, counts) if slots or self._drafts is None else self.plan_draft_only()

    def _plan_next(self) -> tuple[list[Slot], list[int]]:
        for slot in self._slots:
            if slot.load is not None:
                self._sequence_cache.receive(slot)
        active = [slot for slot in self._slots if slot.task is not None and slot.load is None]
        if len(active) > 1:
            active.sort(key=_age)
        groups: dict[BatchGroup, list[Slot]] = {}
        for slot in active:
            groups.setdefault(slot.group, []).append(slot)
        self._served = {group: self._served.get(group, self._n_launched) for group in groups}
        if len(groups) < 2:
            return self._plan_group(active)
        # Groups alternate: the least recently served is next. A group whose tokens are all in flight, or that has to
        # wait for room, lets the others pass.
        busy = sum(slot.task is not None and bool(slot.task.generated) for slot in active)
        for group in sorted(groups, key=self._served.__getitem__):
            slots, counts = self._plan_group(groups[group], n_groups=len(groups), n_generating=busy)
            if slots:
                return slots, counts
        return [], []

    def _plan_group(
        self, active: list[Slot], *, n_groups: int = 1, n_generating: int = 0
    ) -> tuple[list[Slot], list[int]]:
        """Plan a batch for slots that may share one, oldest first.

        `n_groups`, `n_generating`: numbers of such groups, and of generating slots in all of them.
        """
        sequences = self._sequence_cache
        slots: list[Slot] = []
        reading: list[Slot] = []
        n_flying = 0
        for slot in active:
            task = slot.task
            assert task is not None
            handle = slot.handle
            if handle is not None and handle.used == slot.length:  # all of it is in flight
                n_flying += bool(task.generated)
                continue
            behind = slot.length - (0 if handle is None else handle.used)
            if handle is None or not task.generated or behind > self._behind or slot.group.is_media:
                reading.append(slot)
            elif slot.length <= handle.capacity:
                handle.need = slot.length
                slots.append(slot)
            elif sequences.make_room(slot):
                slots.append(slot)
        # making room for one slot may have taken the cells of another
        slots = [slot for slot in slots if slot.handle is not None]
        if len(slots) > self._max_batch:
            self._turn = (self._turn + self._max_batch) % len(slots)
            slots = (slots[self._turn :] + slots[: self._turn])[: self._max_batch]
        self.n_generating = len(slots) + n_flying
        n_generating = max(n_generating, self.n_generating)
        share = -(-self.n_generating * n_groups // self._forward.depth)
        if len(slots) > share > 0:
            # groups, so that every device has one to work on; the slot that waited longest goes first
            slots = sorted(slots, key=lambda slot: slot.task.t_last if slot.task is not None else 0.0)[:share]
        counts, spare = [], self._max_batch - len(slots)
        for slot in slots:
            counts.append(min(slot.n_batchable, 1 + spare))
            spare -= counts[-1] - 1
        if reading and (self._cont_batching or not n_generating):
            return self._add_prompts(slots, counts, reading, n_generating)
        return slots, counts

    def plan_draft_only(self) -> tuple[list[Slot], list[int]]:
        """Return sequences whose draft tokens are all in flight: more may be drafted behind those."""
        memory = self._sequence_cache.memory
        slots: list[Slot] = []
        for slot in self._slots:
            task, handle = slot.task, slot.handle
            if handle is None or task is None or not task.ahead or handle.used != slot.length:
                continue
            if slots and slots[0].scales != slot.scales:
                continue
            if (
                task.ahead.n_moves == memory.n_moves
                and memory.room(handle, slot.length + len(task.ahead), in_place=True) > 0
            ):
                slots.append(slot)
        return slots, [0] * len(slots)

    def _add_prompts(
        self, slots: list[Slot], counts: list[int], reading: list[Slot], n_generating: int
    ) -> tuple[list[Slot], list[int]]:
        """Add as much of the prompts of other slots as the batch has room for behind generating slots.

        Room in the memory is given to the oldest first. Prompts with room are read in the order of `_due_time`,
        each whole before the next: a prompt that shares its passes with others is read later, and none of them
        is read earlier.
        """
        taken = sum(counts)
        room = min(self._max_batch, max(self._forward.chunk, taken + 1))
        if n_generating:
            # even if more slots generate than the smaller batch holds, prompts must proceed
            room = min(room, max(self._busy_tokens(), taken + 1))
        room -= taken
        if room <= 0:
            return slots, counts
        slots, counts, ready = self._allocate_cells(slots, counts, reading)
        ready.sort(key=self._due_time)
        for slot in ready:
            if slots and slot.group != slots[0].group:
                continue  # the cells it shares reach to the start of its adapter, or of a chunk
            left = slot.pending
            count = min(slot.n_batchable, room)
            if count < slot.n_inseparable:
                if slots:
                    break
                count = slot.n_inseparable
            halves = len(ready) > 1 and slot is ready[0] and room < left < 2 * room
            if (
                halves and count > slot.n_inseparable
            ):  # the second half is not so small that another prompt should fill it up
                count = min(count, -(-left // (2 * _PIECE)) * _PIECE)
            slots.append(slot)
            counts.append(count)
            room -= count
            if count == left:  # a slot whose prompt is complete waits for this batch
                room = min(room, _ENOUGH - sum(counts) + taken)
            if room <= 0 or halves:
                break
        return slots, counts

    def _allocate_cells(
        self, slots: list[Slot], counts: list[int], reading: list[Slot]
    ) -> tuple[list[Slot], list[int], list[Slot]]:
        """Allocate cells for the slots that read prompts, oldest first.

        Return the generating slots that still have their cells, their token counts, and the slots whose prompts can
        be read.
        """
        sequences = self._sequence_cache
        ready: list[Slot] = []
        for slot in reading:
            sequences.follow(slot)
            if slot.leader is not None and not sequences.leader_done(slot):
                continue
            if slot.leader is not None or slot.handle is None or slot.handle.need < slot.length:
                got_room = sequences.make_room(slot)
                if any(other.handle is None for other in slots):
                    keep = [i for i, other in enumerate(slots) if other.handle is not None]
                    slots = [slots[i] for i in keep]
                    counts = [counts[i] for i in keep]
                if not got_room:
                    break  # younger ones would take the room that this one waits for
            if slot.recall:
                sequences.recall(slot)
                if slot.load is not None:
                    continue
            span, task = slot.next_span if slot.spans else None, slot.task
            if span is None or task is None or self._media.provide(task, span.chunk):
                ready.append(slot)
        return slots, counts, ready

    def _due_time(self, slot: Slot) -> float:
        """Return when a slot's prompt would have been read without any other request: requests that arrive after that
        do not overtake it.
        """
        task, pace = slot.task, self._stats.prompt_pace
        assert task is not None
        return task.t_arrival + (slot.pending / pace if pace else 0.0)

    def _busy_tokens(self) -> int:
        """Return the most tokens of a step that delays generating slots: the prompt tokens recently read in
        STEP_SECONDS.
        """
        pace = int(self._stats.prompt_pace * STEP_SECONDS) // PACE_UNIT * PACE_UNIT
        return min(self._busy_batch, max(pace, PACE_UNIT)) if pace else self._busy_batch

    # -- filling -----------------------------------------------------------------------------------------------------

    def fill(self, slots: list[Slot], counts: list[int]) -> ScheduledBatch:
        """Fill the batch that `plan` chose, with draft tokens if there is room. Raises DeviceLost."""
        n = 0
        tokens = self._tokens
        spans: list[Span] = []
        shares: list[BatchShare] = []
        outputs: list[int] = []
        rows: list[NDArray[np.float32]] = []
        n_prompt = 0
        memory = self._sequence_cache.memory
        drafts = self._draft(slots, counts)
        for slot, count, draft in zip(slots, counts, drafts, strict=True):
            handle, task = slot.handle, slot.task
            assert handle is not None and task is not None
            used, end, epoch = handle.used, handle.used + count, task.ahead.epoch
            tokens[n : n + count] = slot.tokens[used:end]
            n += count
            n_ahead = 0 if count else len(task.ahead) - len(draft)
            if draft:
                tokens[n : n + len(draft)] = draft
                n += len(draft)
            elif not count:
                continue
            self._sequence_cache.keep_checkpoints(slot, count + len(draft))
            span = slot.next_span if slot.spans else None
            if span is not None:
                rows.append(task.embeddings[span.chunk.digest][used - span.start : end - span.start])
            back = memory.n_before
            recent = [*slot.tokens[max(used - back, 0) : used], *task.ahead.tokens[:n_ahead]] if back else []
            spans.append(slot.span(count + len(draft), n_ahead, recent[-back:], multi=self._media.multi_positions))
            row, n_before = None, len(outputs)
            if task.needs_prompt_rows and span is None:
                outputs.extend(range(n - count, n - (end == slot.length)))
            prompt_rows = slice(n_before, len(outputs))
            if end == slot.length:
                row = len(outputs)
                outputs.extend(range(n - len(draft) - bool(count), n))
            first_row = end + n_ahead + (not count)
            shares.append(
                BatchShare(slot, task, handle, count, row, draft, memory.n_moves, first_row, epoch, prompt_rows)
            )
            task.ahead.n_moves = memory.n_moves
            if not task.generated:
                n_prompt += count
        rows_out = np.array(outputs, np.int32)
        embeddings = np.concatenate(rows) if rows else None
        return ScheduledBatch(tokens[:n], spans, rows_out, slots[0].group, shares, n_prompt, embeddings)

    def _draft(self, slots: list[Slot], counts: list[int]) -> list[list[int]]:
        """Return draft tokens for each slot, as many as there is room for and as are worth their time."""
        found: list[list[int]] = [[] for _ in slots]
        if self._drafts is None:
            return found
        room = (self._max_batch - sum(counts)) // len(slots)
        requests, drafting = [], []
        for i, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            task, handle = slot.task, slot.handle
            assert task is not None and handle is not None
            if not task.generated or handle.used + count != slot.length:
                continue
            length = slot.length + len(task.ahead)
            most = min(WINDOW if self.overlaps else MOST, room, slot.n_ctx - length - 1)
            if self._sequence_cache.memory.has_states:
                most = min(most, _TOGETHER - count)
            most = min(most, self._sequence_cache.memory.room(handle, length, in_place=not count))
            if task.budget >= 0:
                most = min(most, task.budget - 1 - len(task.ahead))
            if most > 0:
                if task.draft_state is None:
                    task.draft_state = self._drafts.follow(task.ahead, task.sampler.guess(), media=bool(slot.spans))
                place = task.n_prompt + len(task.generated)
                requests.append(DraftRequest(task.draft_state, slot.tokens, slot.length, most, place))
                drafting.append(i)
        drafts = self._drafts.propose(
            requests, self.n_generating, overlaps=self.overlaps, waiting=self.overlaps and not any(counts)
        )
        for i, draft in zip(drafting, drafts, strict=True):
            if draft is not None:
                found[i] = draft.tokens
        return found

    def started(self, batch: ScheduledBatch) -> None:
        """Record that the batch was started. Batches run in order, so for later plans it counts as done."""
        self._n_launched += 1
        self._served[batch.group] = self._n_launched
        stats = self._stats
        for share in batch.shares:
            handle = share.handle
            handle.used += share.n
            handle.need = max(handle.need, handle.used + len(share.task.ahead))
            stats.n_tokens_max = max(stats.n_tokens_max, handle.used)


def _age(slot: Slot) -> int:
    return slot.age
