"""The slots' sequences in the model's memory: allocation of cells, and reuse of known prefixes.

Cells of a known prefix come from the slot's last sequence, from another slot (the cells are shared), or from the prompt
cache (see cache/prompt_cache.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceLost
from llamado.engine.cache.disk_cache import LEAST, DiskCache
from llamado.engine.cache.prompt_cache import CellReader, PromptStore, ReadRate
from llamado.engine.cache.snapshots import NEAR, Snapshots, points
from llamado.engine.errors import NoRoom
from llamado.engine.forward.contract import Cells, Forward, Scales, piece_cells
from llamado.engine.media.spans import Spans, longest_whole, whole_chunks
from llamado.engine.options import CacheOptions
from llamado.engine.scheduler.queue import Queue
from llamado.engine.scheduler.slots import Slot, Task
from llamado.engine.scheduler.statistics import Statistics

log = logging.getLogger(__name__)

# sharing a token's K and V costs microseconds, evaluating it up to milliseconds; below this many tokens the extra calls
# are not worth it
MIN_SHARED = 16
# sequences that lose fewer tokens than this are not stored
MIN_STORE = 64
# most cells that a sequence gets beyond those it needs now, so that it seldom has to move
HEADROOM = 1024
# most pieces from disk that are sent to devices between two steps
_PIECES = 4
# most seconds for saving when the engine ends
_SAVE_SECONDS = 10.0


class SequenceCache:
    """Each slot's sequence in the model's memory. Only the engine's thread uses it.

    `control`: control tokens, ascending. `note_loss` is called for a lost device if nothing has to fail because of it.
    """

    def __init__(
        self,
        forward: Forward,
        queue: Queue,
        stats: Statistics,
        options: CacheOptions,
        control: NDArray[np.int32],
        note_loss: Callable[[DeviceLost], None],
    ) -> None:
        self.memory = forward.memory
        self._forward = forward
        self._numerics = forward.numerics
        self.slots = queue.slots
        self._stats = stats
        self._idle_slots = options.cache_idle_slots if options.cache_ram else None
        self._notify, self._note_loss = queue.notify, note_loss
        self._void = False
        self._control = control
        self._every = options.checkpoint_min_step or forward.max_batch
        self._most_snapshots = options.ctx_checkpoints
        self.store: PromptStore | None = None
        self.disk: DiskCache | None = None
        limit, disk = options.cache_ram, None
        if limit and options.cache_disk is not None:
            disk = self.open_disk(Path(options.cache_disk), options.cache_disk_size)
        self.use_memory(None if limit < 0 else limit << 20, disk)
        self._reader = CellReader(self.memory, piece_cells(self.memory.token_bytes))
        self._tail_rate = ReadRate()

    def open_disk(self, folder: Path, limit: int) -> DiskCache:
        """Open a cache of `limit` bytes in a folder. Raises DiskCacheUnusable. Any thread."""
        forward = self._forward
        return DiskCache(folder, limit, forward.cell_kind, lambda: forward.numerics)

    def use_memory(self, limit: int | None, disk: DiskCache | None) -> None:
        """Use `limit` bytes of memory (None: no limit) for sequences that no slot holds, and `disk` for the rest.

        Earlier sequences are written to the previous disk cache, if there was one, and dropped from memory.
        """
        self.save()
        self.store, self.disk = None, disk
        memory = self.memory
        if limit != 0:
            self.store = PromptStore(
                limit,
                memory.token_bytes,
                piece_cells(memory.token_bytes),
                memory,
                max(self._most_snapshots, 1),
                None if disk is None else disk.put,
            )
        if memory.has_tails:
            for slot in self.slots:
                slot.snapshots.cut(0)
                store = self.store
                slot.snapshots = (
                    Snapshots() if store is None else Snapshots(self._most_snapshots, store.reserve, store.release)
                )

    # -- beginning and losing them -----------------------------------------------------------------------------------

    def begin(self, slot: Slot, task: Task, prompt: NDArray[np.int32]) -> None:
        """Give a slot to a request, and find the slot with the longest common prefix."""
        self._check_numerics()
        n_keep = branch = 0
        if task.params.cache_prompt:
            # the last token is always evaluated, because its logits are not kept
            scales, spans = task.scales, task.request.media
            branch = self._shared(slot, prompt, scales, spans)
            n_keep = self._reach(slot, branch, spans)
            longest = n_keep + MIN_SHARED - 1
            stored = 0
            if self.store is not None:
                found = self.store.find(prompt[:-1], longest + 1, scales, self._limit(spans))
                if found is not None:
                    stored = found[1]
                    branch = max(branch, found[0].shared(prompt[:-1], scales))
            branch = max(branch, self._find_leader(slot, prompt, scales, task.id, longest, stored, spans))
        self._store(slot, n_keep)
        self._rewind(slot, n_keep)
        slot.begin(task, prompt)
        slot.branch = branch
        self._mark(slot)
        self._stats.queue.add(task.t_start - task.t_arrival)
        self._stats.n_cached += slot.used
        if self._idle_slots is not None:
            for other in self.slots:
                if other.idle and other.handle is not None and (slot.leader is None or other is not slot.leader[0]):
                    self._store(other)
                    if self._idle_slots == "clear":
                        self.drop(other)

    def _shared(
        self, other: Slot, prompt: NDArray[np.int32], scales: Scales, spans: Spans, length: int | None = None
    ) -> int:
        """Return how many first tokens of a prompt, without its last one and with no chunk cut, another slot has in its
        cells or in the first `length` tokens of its sequence.
        """
        return whole_chunks(spans, min(other.common_prefix(prompt, scales, length), prompt.size - 1))

    def _limit(self, spans: Spans) -> Callable[[int, int], int]:
        """Return `Memory.tail_reach` for a sequence with these chunks, none of which is cut."""
        reach = self.memory.tail_reach
        return lambda tail, n: longest_whole(spans, n, lambda n: reach(tail, n))

    def _find_leader(
        self,
        slot: Slot,
        prompt: NDArray[np.int32],
        scales: Scales,
        age: int,
        longest: int,
        stored: int,
        spans: Spans = (),
    ) -> int:
        """Set the slot's leader: the slot that has, or as an older request is reading, the longest common prefix of
        more than `longest` tokens. `stored` of them need not be waited for. Return the longest common prefix with any
        slot.
        """
        branch = 0
        for other in self.slots:
            if other is slot or (other.task is None and other.handle is None):
                continue
            shared = self._shared(other, prompt, scales, spans, other.length)
            branch = max(branch, shared)
            coming = shared > other.used
            if not coming:
                shared = self._reach(other, shared, spans)
            elif shared <= stored or other.age >= age:
                continue
            if shared > longest:
                longest = shared
                slot.leader = other, other.last_task
                if coming and other.handle is not None:
                    self.memory.mark(other.handle, shared)
                elif coming:
                    other.branch = shared
        return branch

    def follow(self, slot: Slot) -> None:
        """Find a leader again for a request that lost its cells, or has none yet."""
        if slot.handle is None and slot.leader is None and slot.recall:
            prompt = slot.tokens[: slot.length]
            self._find_leader(slot, prompt, slot.scales, slot.age, MIN_SHARED - 1, 0, slot.spans)

    def drop(self, slot: Slot) -> None:
        """Free a slot's cells; a request in the slot reads its sequence again."""
        slot.discard_drafts()
        self._cancel_read(slot)
        slot.snapshots.cut(0)
        if slot.handle is not None:
            self.memory.free(slot.handle)
            slot.handle = None
        slot.recall = slot.task is not None and slot.task.params.cache_prompt
        if slot.task is None:
            slot.length = 0

    def forget(self) -> None:
        """Drop all cells because devices change; every sequence is read again."""
        self._void = True
        for slot in self.slots:
            slot.leader = None
            self.drop(slot)

    def _check_numerics(self) -> None:
        """Clear the prompt cache if different devices, whose bits may differ, computed it."""
        if not self._void:
            return
        self._void = False
        before, self._numerics = self._numerics, self._forward.numerics
        if self.store is not None and (self._numerics is None or self._numerics != before):
            self.store.clear()

    def reset(self) -> None:
        """Drop all sequences and cells."""
        self.memory.clear()
        for slot in self.slots:
            self._cancel_read(slot)
            slot.snapshots.cut(0)
            slot.handle = None
            slot.length = 0

    def save(self) -> None:
        """Write the sequences of slots and prompt cache to disk, and stop writing."""
        if self.disk is None:
            return
        self._check_numerics()
        for slot in sorted(self.slots, key=lambda slot: slot.t_last_used):
            self._store(slot)
        self.disk.finish([] if self.store is None else self.store.all(), _SAVE_SECONDS)

    def shift(self, slot: Slot, n_keep: int, n_discard: int) -> None:
        """Drop `n_discard` tokens behind the first `n_keep`, and the cells behind those."""
        slot.shift(n_keep, n_discard)
        self._rewind(slot, self._reach(slot, n_keep, slot.spans))

    def settle(self, slot: Slot) -> None:
        """Discard rejected and unused draft tokens of the slot's sequence."""
        if slot.handle is not None and not (slot.task is not None and slot.task.ahead):
            try:
                self.memory.rewind_rejected(slot.handle)
            except DeviceLost as error:
                self._note_loss(error)
                self.drop(slot)
            if slot.task is None:
                slot.length = slot.used

    def _reach(self, slot: Slot, n: int, spans: Spans) -> int:
        """Return the longest prefix, at most `n` tokens, that the slot's sequence can go back to, and that cuts none of
        these chunks.
        """
        handle = slot.handle
        if handle is None:
            return 0
        return longest_whole(spans, n, lambda n: max(self.memory.reach(handle, n), self._snapshot_for(slot, n)[0]))

    def _snapshot_for(self, slot: Slot, n: int) -> tuple[int, int]:
        """Return the longest prefix, at most `n` tokens, that a checkpoint of the slot allows, and the checkpoint's
        token count.
        """
        return max(((self.memory.tail_reach(known, n), known) for known in slot.snapshots.tails), default=(0, 0))

    def _rewind(self, slot: Slot, n: int) -> None:
        """Take the slot's sequence back to its first `n` tokens, which it can reach."""
        handle = slot.handle
        try:
            if handle is not None and not self.memory.rewind(handle, n):
                _, tail = self._snapshot_for(slot, n)
                self.memory.restore(handle, n, tail, slot.snapshots.tails[tail])
        except DeviceLost as error:
            self._note_loss(error)  # all cells are void, and will be dropped
            self.drop(slot)
        slot.snapshots.cut(n)

    def _mark(self, slot: Slot) -> None:
        """Mark points of a prompt for checkpoints: where messages begin and end, and where earlier prompts branched
        off.
        """
        task, handle = slot.task, slot.handle
        if handle is None or task is None or task.truncated or not self.memory.has_tails:
            return
        prompt, marks = slot.tokens[: task.n_prompt], []
        if slot.used and slot.used + NEAR < task.n_prompt:
            marks.append(slot.used)  # the end of the previous answer
        for point in points(prompt, self._control, self._every):
            if point > slot.used + NEAR or point >= task.n_prompt - NEAR:
                marks.append(point)
        if slot.branch > slot.used + NEAR:
            marks.append(slot.branch)
        for mark in marks:
            if mark := whole_chunks(slot.spans, mark):
                self.memory.mark(handle, mark)

    def keep_checkpoints(self, slot: Slot, n: int) -> None:
        """Store checkpoints that the slot's sequence would lose by continuing with `n` tokens.

        Raises DeviceLost.
        """
        handle = slot.handle
        assert handle is not None
        if not self.memory.has_tails:
            return
        for point in self.memory.expiring(handle, n):
            snapshots, size = slot.snapshots, self.memory.tail_bytes(point)
            lost = point - max((known for known in snapshots.tails if known < point), default=0)
            if not snapshots.lacks(point) or not self._tail_rate.pays(size, lost, self._stats.prompt_pace):
                continue
            if not snapshots.make_room(size):
                continue
            try:
                began = time.perf_counter()
                snapshots.put(point, self.memory.read_tail(handle, point))
                self._tail_rate.note(size, time.perf_counter() - began)
            except DeviceLost:
                raise
            except Exception:
                log.exception("storing a context checkpoint failed")

    def _store(self, slot: Slot, n_same: int = 0) -> None:
        """Store a slot's sequence in the prompt cache, if that is worth its time, before all but `n_same` tokens are
        lost.
        """
        store, handle = self.store, slot.handle
        if store is None or handle is None or handle.used - n_same < MIN_STORE or slot.load is not None:
            return
        tokens = slot.tokens[: handle.used]
        scales = slot.scales
        others = (other for other in self.slots if other is not slot)
        held = any(other.common_prefix(tokens, scales) == tokens.size for other in others)
        if held or store.holds(tokens, scales):
            return
        try:
            if self._reader.pays(handle, self._stats.prompt_pace):
                memory = self.memory

                def read(start: int, n: int) -> Cells:
                    return self._reader.read(handle, start, n)

                at_hand = slot.snapshots.tails
                store.put(tokens, read, scales, memory.tails(handle), lambda n: memory.read_tail(handle, n), at_hand)
        except DeviceLost as error:
            self._note_loss(error)
        except Exception:
            log.exception("storing a sequence in the prompt cache failed")

    # -- room --------------------------------------------------------------------------------------------------------

    def make_room(self, slot: Slot) -> bool:
        """Allocate cells for all tokens of the slot's sequence, taken from idle slots and, if necessary, from younger
        requests.

        A request that loses its cells keeps its tokens, and reads them again when there is room: it is late, but its
        answer is the same. The oldest request always gets room, so all requests complete. Cells of the slot's leader
        are shared instead of being computed. Raises DeviceLost.
        """
        self._check_numerics()
        task = slot.task
        assert task is not None
        need = slot.length
        ahead = HEADROOM if task.budget < 0 else min(task.budget, HEADROOM)
        want = min(need + ahead, slot.n_ctx)
        while True:
            if self._fork(slot, need, want):
                return True
            if slot.handle is None:
                slot.handle = self.memory.allocate(need, want)
                if slot.handle is not None:
                    slot.leader = None
                    self._mark(slot)
                    return True
            elif self.memory.grow(slot.handle, need, want):
                slot.leader = None
                return True
            leader = slot.leader[0] if slot.leader is not None else None
            idle = [other for other in self.slots if other.idle and other.handle is not None]
            if idle:
                victim = min(idle, key=lambda other: (other is leader, other.t_last_used))
            else:
                younger = [other for other in self.slots if other.handle is not None and other.age > task.id]
                if not younger:
                    return False
                victim = max(younger, key=lambda other: other.age)
            self._store(victim)
            self.drop(victim)

    def empty(self, slot: Slot, n: int, scales: Scales) -> None:
        """Replace an idle slot's sequence by room for `n` tokens. Raises NoRoom."""
        self._check_numerics()
        self._store(slot)
        self.drop(slot)
        slot.scales, slot.spans = scales, ()
        if not n:
            return
        while (handle := self.memory.allocate(n)) is None:
            idle = [other for other in self.slots if other.idle and other.handle is not None]
            if not idle:
                raise NoRoom(f"there is no room for {n} tokens beside the running answers")
            victim = min(idle, key=lambda other: other.t_last_used)
            self._store(victim)
            self.drop(victim)
        slot.handle = handle

    # -- known prefixes ----------------------------------------------------------------------------------------------

    def leader_done(self, slot: Slot) -> bool:
        """Return True if the leader has the shared prefix, or will never have it."""
        assert slot.leader is not None
        leader, task = slot.leader
        if leader.load is not None:
            return False
        if leader.task is not task or leader.handle is None:
            return True
        wanted = self._shared(leader, slot.tokens[: slot.length], slot.scales, slot.spans, leader.length)
        return leader.handle.used >= wanted

    def _fork(self, slot: Slot, need: int, want: int) -> bool:
        """Begin the slot's sequence with its leader's cells, if that gains enough tokens. Return True if it did and
        there was room. Raises DeviceLost.
        """
        if slot.leader is None or slot.task is None:
            return False
        leader, known = slot.leader[0], slot.used
        shared = self._shared(leader, slot.tokens[: slot.length], slot.scales, slot.spans)
        shared = self._reach(leader, shared, slot.spans)
        if leader.handle is None or shared - known < MIN_SHARED:
            return False
        tail = None
        if self.memory.reach(leader.handle, shared) != shared:
            at = self._snapshot_for(leader, shared)[1]
            tail = at, leader.snapshots.tails[at]
        if slot.handle is not None:  # there would be no room for both
            self.memory.free(slot.handle)
            slot.handle = None
            self._count(slot.task, -known)
        slot.handle = self.memory.fork(leader.handle, shared, need, want, tail)
        if slot.handle is None:
            return False
        slot.leader = None
        self._mark(slot)
        self._count(slot.task, shared)
        return True

    def _count(self, task: Task, n: int) -> None:
        """Count `n` tokens of a request's prompt as cached."""
        if not task.generated:
            task.n_cached += n
            self._stats.n_cached += n

    def recall(self, slot: Slot) -> None:
        """Restore the beginning of the slot's sequence from the prompt cache. Raises DeviceLost."""
        slot.recall = False
        task, handle = slot.task, slot.handle
        assert task is not None and handle is not None
        # the last token is always evaluated, because its logits are not kept
        wanted, limit, found = slot.tokens[: slot.length - 1], self._limit(slot.spans), None
        if self.store is not None:
            found = self.store.find(wanted, handle.used + MIN_SHARED, slot.scales, limit)
        if self.disk is not None:
            memory = self.memory
            chain = self.disk.find(wanted, slot.scales, limit, memory.has_tails)
            least = max(handle.used, 0 if found is None else found[1]) + LEAST
            if chain is not None and chain.n >= least and self.disk.pays(chain, handle.used, self._stats.prompt_pace):
                slot.load = self.disk.load(chain, handle.used, slot.scales, self._notify)
                return
        if found is None:
            return
        assert self.store is not None
        stored, shared = found
        used = handle.used
        tail = self.store.tail(stored, shared)
        self.memory.write_tail(handle, tail, stored.tails[tail])
        for at, n, cells in stored.pieces(used, shared):
            self.memory.write(handle, at + n - handle.used, cells, skip=handle.used - at)
        self._count(task, shared - used)

    # -- prefixes from disk ------------------------------------------------------------------------------------------

    def receive(self, slot: Slot) -> None:
        """Take the pieces of the slot's sequence that were read from disk. Raises DeviceLost."""
        load, handle, task = slot.load, slot.handle, slot.task
        assert load is not None
        if handle is None or task is None or task.cancelled:
            self._cancel_read(slot)
            return
        over = load.is_finished
        for _ in range(_PIECES):
            piece = load.take()
            if piece is None:
                break
            if load.chain.tail is not None and load.tail is not None:
                self.memory.write_tail(handle, load.chain.tail.end, load.tail)
                load.tail = None
            at, n, cells = piece
            self.memory.write(handle, at + n - handle.used, cells, skip=handle.used - at)
        if not over:
            return
        slot.load = None
        if load.failed:
            # with tails, nothing but all of it can be used
            self.memory.rewind(handle, 0 if self.memory.has_tails else whole_chunks(slot.spans, handle.used))
            return
        load.done()
        self._count(task, handle.used - load.first)

    def cancel_stale_reads(self) -> None:
        """Cancel reads from disk for requests that are over."""
        for slot in self.slots:
            if slot.load is not None and slot.task is None:
                self._cancel_read(slot)

    def _cancel_read(self, slot: Slot) -> None:
        """Cancel the slot's read from disk."""
        if slot.load is not None:
            slot.load.cancel()
            slot.load = None
            if slot.handle is not None and self.memory.has_tails:
                self.memory.rewind(slot.handle, 0)
