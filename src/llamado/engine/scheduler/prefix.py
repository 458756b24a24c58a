"""The slots' sequences in the pool's cells: who has room there, and what need not be computed again.

Cells of a beginning that is known come from three places: the slot's last sequence, another slot (they are copied), or
this machine's memory (see cache/prompt_cache.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceLost
from llamado.engine.cache.kv_pool import KVPool
from llamado.engine.cache.prompt_cache import CellReader, Store
from llamado.engine.errors import NoRoom
from llamado.engine.forward.contract import Forward, Scales
from llamado.engine.scheduler.slot_io import piece_cells
from llamado.engine.scheduler.slots import Slot, Task
from llamado.engine.scheduler.statistics import Statistics

log = logging.getLogger(__name__)

# Copying a token's K and V costs microseconds, evaluating it up to milliseconds; below this many tokens the extra call
# is not worth it.
MIN_COPY = 16
# Sequences that lose fewer tokens than this are not kept in memory.
MIN_STORE = 64
# Cells a sequence gets beyond those it needs now, at most, so that it seldom has to move.
HEADROOM = 1024


class Sequences:
    """Which cells each slot's sequence has; of the engine's thread alone.

    `cache_ram`: MiB of memory for sequences that no slot holds any more (-1: no limit, 0: none). `idle_slots`: what
    happens to those of idle slots when a request begins (see Engine). `note_loss` is told of a device that was lost
    where nothing has to fail for it.
    """

    def __init__(
        self,
        forward: Forward,
        slots: Sequence[Slot],
        stats: Statistics,
        *,
        n_ctx: int,
        cache_ram: int,
        idle_slots: Literal["keep", "clear"] | None,
        note_loss: Callable[[DeviceLost], None],
    ) -> None:
        self._forward = forward
        self._slots = slots
        self._stats = stats
        self._n_ctx = n_ctx
        self._idle_slots = idle_slots
        self._note_loss = note_loss
        self.pool = KVPool(forward.n_cells, self._move)
        self.n_moves = 0
        """How often cells were moved."""
        piece = piece_cells(forward.cell_bytes)
        limit = None if cache_ram < 0 else cache_ram << 20
        self.store = Store(limit, forward.cell_bytes, piece) if cache_ram else None
        self._reader = CellReader(forward, piece)

    def _move(self, src: int, dst: int, n: int) -> None:
        self.n_moves += 1
        self._forward.copy_cells(src, dst, n)

    # -- beginning and losing them -----------------------------------------------------------------------------------

    def begin(self, slot: Slot, task: Task, prompt: NDArray[np.int32]) -> None:
        """Give a slot to a request, and see which other slot has more of its prompt."""
        n_keep = 0
        if task.request.cache_prompt:
            # The last token is always evaluated: its logits are not kept.
            scales = task.scales
            n_keep = min(slot.common_prefix(prompt, scales), prompt.size - 1)
            longest = n_keep + MIN_COPY - 1
            if self.store is not None:
                found = self.store.find(prompt[:-1], longest + 1, scales)
                longest = max(longest, 0 if found is None else found[1])
            for other in self._slots:
                if other is slot or (other.task is None and other.run is None):
                    continue
                shared = min(other.common_prefix(prompt, scales, other.length), prompt.size - 1)
                if shared > longest:
                    longest = shared
                    slot.leader = other, other.last_task
        self._keep(slot, n_keep)
        slot.begin(task, prompt, n_keep)
        self._stats.queue.add(task.t_start - task.t_arrival)
        self._stats.n_cached += n_keep
        if self._idle_slots is not None:
            for other in self._slots:
                if other.idle and other.run is not None and (slot.leader is None or other is not slot.leader[0]):
                    self._keep(other)
                    if self._idle_slots == "clear":
                        self.drop(other)

    def drop(self, slot: Slot) -> None:
        """A slot's cells are free; a request that has the slot reads its sequence again."""
        if slot.run is not None:
            self.pool.free(slot.run)
            slot.run = None
        slot.recall = slot.task is not None and slot.task.request.cache_prompt
        if slot.task is None:
            slot.length = 0

    def forget(self) -> None:
        """Every sequence is to be read again."""
        for slot in self._slots:
            slot.leader = None
            self.drop(slot)

    def reset(self) -> None:
        """Nothing is known about any cell."""
        self.pool = KVPool(self._forward.n_cells, self._move)
        for slot in self._slots:
            slot.run = None
            slot.length = 0

    def _keep(self, slot: Slot, n_same: int = 0) -> None:
        """A slot loses its sequence but for `n_same` tokens: put it into memory where that is worth its time."""
        store, run = self.store, slot.run
        if store is None or run is None or run.used - n_same < MIN_STORE:
            return
        tokens = slot.tokens[: run.used]
        scales = slot.scales
        others = (other for other in self._slots if other is not slot)
        held = any(other.common_prefix(tokens, scales) == tokens.size for other in others)
        if held or store.holds(tokens, scales):
            return
        try:
            if self._reader.pays(run.start, run.used, self._stats.prompt_pace):
                store.put(tokens, lambda start, n: self._reader.read(run.start + start, n), scales)
        except DeviceLost as error:
            self._note_loss(error)
        except Exception:
            log.exception("a sequence could not be kept")

    # -- room --------------------------------------------------------------------------------------------------------

    def make_room(self, slot: Slot) -> bool:
        """Cells for all tokens of the slot's sequence, taken from idle slots and, if need be, from younger requests.

        A request that loses its cells keeps its tokens, and reads them again when there is room: it is late, but its
        answer is the same. The oldest request always gets room, so all get done.
        """
        task = slot.task
        assert task is not None
        need = slot.length
        ahead = HEADROOM if task.budget < 0 else min(task.budget, HEADROOM)
        want = min(need + ahead, self._n_ctx)
        while True:
            if slot.run is None:
                slot.run = self.pool.allocate(need, want)
                if slot.run is not None:
                    return True
            elif self.pool.grow(slot.run, need, want):
                return True
            leader = slot.leader[0] if slot.leader is not None else None
            idle = [other for other in self._slots if other.idle and other.run is not None]
            if idle:
                victim = min(idle, key=lambda other: (other is leader, other.t_last_used))
            else:
                younger = [other for other in self._slots if other.run is not None and other.age > task.id]
                if not younger:
                    return False
                victim = max(younger, key=lambda other: other.age)
            self._keep(victim)
            self.drop(victim)

    def empty(self, slot: Slot, n: int, scales: Scales) -> None:
        """Room for `n` tokens in place of an idle slot's sequence. Raises NoRoom."""
        self._keep(slot)
        self.drop(slot)
        slot.scales = scales
        if not n:
            return
        while (run := self.pool.allocate(n)) is None:
            idle = [other for other in self._slots if other.idle and other.run is not None]
            if not idle:
                raise NoRoom(f"there is no room for {n} tokens beside the answers that are being written")
            victim = min(idle, key=lambda other: other.t_last_used)
            self._keep(victim)
            self.drop(victim)
        slot.run = run

    # -- beginnings that are known -----------------------------------------------------------------------------------

    def leader_done(self, slot: Slot) -> bool:
        """Whether the beginning that is to be copied is there, or will not come."""
        assert slot.leader is not None
        leader, task = slot.leader
        if leader.task is not task or leader.run is None:
            return True
        wanted = min(leader.common_prefix(slot.tokens[: slot.length], slot.scales, leader.length), slot.length - 1)
        return leader.run.used >= wanted

    def copy_prefix(self, slot: Slot) -> None:
        """Take from the slot's leader what their sequences share, instead of computing it. Raises DeviceLost."""
        assert slot.leader is not None and slot.run is not None and slot.task is not None
        leader, _ = slot.leader
        slot.leader = None
        shared = min(leader.common_prefix(slot.tokens[: slot.length], slot.scales), slot.length - 1)
        used = slot.run.used
        n = shared - used
        if leader.run is not None and n >= MIN_COPY:
            self._forward.copy_cells(leader.run.start + used, slot.run.start + used, n)
            slot.run.used = shared
            slot.task.n_cached += n
            self._stats.n_cached += n

    def recall(self, slot: Slot) -> None:
        """Take from memory what the slot's sequence begins with, instead of computing it. Raises DeviceLost."""
        slot.recall = False
        task, run = slot.task, slot.run
        assert task is not None and run is not None
        # The last token is always evaluated: its logits are not kept.
        wanted = slot.tokens[: slot.length - 1]
        found = self.store.find(wanted, run.used + MIN_COPY, slot.scales) if self.store is not None else None
        if found is None:
            return
        stored, shared = found
        for at, n, cells in stored.pieces(run.used, shared):
            self._forward.write_cells(run.start + at, n, cells)
        if not task.generated:
            task.n_cached += shared - run.used
            self._stats.n_cached += shared - run.used
        run.used = shared
