"""Saving, restoring and erasing slots.

Files take long, and steps must not wait for them: a thread reads or writes the file, and lets the engine's thread move
a few cells at a time between two steps. Meanwhile the slot is held, and no request gets it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceLost
from llamado.engine.cache.slot_file import SlotFile, SlotReader, write_slot
from llamado.engine.errors import EngineError
from llamado.engine.forward.contract import CellKind, Cells, Forward, Scales, piece_cells
from llamado.engine.request import Done, Event, Failure, GenerationParams, Request
from llamado.engine.sampling.chain import Sampler, SamplerSetup
from llamado.engine.sampling.params import Sampling
from llamado.engine.scheduler.prefix import SequenceCache
from llamado.engine.scheduler.queue import CallQueue, Queue, SlotTask
from llamado.engine.scheduler.slots import Slot, Task
from llamado.errors import LlamadoError
from llamado.models.memory import Handle

log = logging.getLogger(__name__)

Tokens = NDArray[np.int32]

# most losses of devices while a slot is saved or restored
_ATTEMPTS = 5


class CellsGone(EngineError):
    """The cells of a held slot were lost with a device."""


class SlotHold:
    """Exclusive access of a job to a slot.

    Unless marked, methods run on the engine's thread, and raise DeviceLost or CellsGone.
    """

    def __init__(self, slot: Slot, forward: Forward, sequences: SequenceCache, queue: Queue) -> None:
        slot.held = True
        self._slot = slot
        self._forward = forward
        self._memory = forward.memory
        self._sequence_cache = sequences
        self._queue = queue

    @property
    def n_ctx(self) -> int:
        """Most tokens of the slot. Any thread."""
        return self._slot.n_ctx

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary. Any thread."""
        return self._forward.n_vocab

    def cell_kind(self, scales: Scales) -> CellKind:
        """Return the meaning of cells that were computed with these adapter scales. Any thread."""
        return self._forward.cell_kind(scales)

    def tokens(self) -> Tokens:
        """Return the sequence."""
        slot = self._slot
        slot.spans = tuple(span for span in slot.spans if span.start < slot.used)
        return slot.tokens[: slot.used].copy()

    def scales(self) -> Scales:
        """Return the adapter scales of its cells."""
        return self._slot.scales

    def rebuild(self, tokens: Tokens) -> Future[None]:
        """Compute the cells of a sequence again. Raises CellsGone if it has media that are not known."""
        spans = self._slot.spans
        if int(np.count_nonzero(tokens < 0)) != sum(min(span.stop, tokens.size) - span.start for span in spans):
            raise CellsGone("the cells of the slot were lost with a device, and its media are not known any more")
        done: Future[None] = Future()

        def emit(event: Event) -> None:
            if isinstance(event, Done):
                done.set_result(None)
            elif isinstance(event, Failure):
                done.set_exception(event.error)

        request = Request(prompt=tokens.tolist(), params=GenerationParams(n_predict=0), media=spans)
        sampler = Sampler(Sampling(), SamplerSetup(self._forward.n_vocab), seed=0)
        task = Task(request, emit, sampler=sampler, seed=0, scales=self._slot.scales)
        self._queue.enter(task)
        self._sequence_cache.begin(self._slot, task, tokens)
        return done

    def read(self, start: int, n: int) -> Cells:
        """Read cells of the sequence."""
        return self._memory.read(self._handle(start + n), start, n)

    def read_tail(self, n: int) -> Cells:
        """Read the state of layers that do not keep all tokens, after the first `n`."""
        return self._memory.read_tail(self._handle(n), n) if n else np.empty(0, np.uint8)

    def points(self) -> list[int]:
        """Return the token counts of the checkpoints that `snapshot` returns, besides that of all tokens."""
        handle = self._handle(0) if self._slot.handle is not None else None
        here = [] if handle is None or not self._memory.has_tails else self._memory.tails(handle)
        return sorted({n for n in (*here, *self._slot.snapshots.tails) if n < self._slot.used})

    def snapshot(self, n: int) -> Cells:
        """Return the state of layers that do not keep all tokens, after the first `n`."""
        known = self._slot.snapshots.tails.get(n)
        return self.read_tail(n) if known is None else known

    def put_snapshot(self, n: int, tail: Cells) -> None:
        """Store a checkpoint of the written sequence, if there is room for it."""
        snapshots = self._slot.snapshots
        if snapshots.lacks(n) and snapshots.make_room(tail.size):
            snapshots.put(n, tail)

    def make_room(self, n: int, scales: Scales) -> None:
        """Drop the sequence and allocate `n` cells for one with these scales.

        Raises NoRoom if running answers have them.
        """
        self._sequence_cache.empty(self._slot, n, scales)

    def write(self, tokens: Tokens, cells: Cells) -> None:
        """Append tokens and their cells to the sequence."""
        slot, handle = self._slot, self._handle(0)
        used = handle.used
        self._memory.write(handle, tokens.size, cells)
        slot.tokens[used : used + tokens.size] = tokens
        slot.length = handle.used

    def write_tail(self, n: int, tail: Cells) -> None:
        """Write the tail of the `n` tokens that are written after it."""
        if n:
            self._memory.write_tail(self._handle(0), n, tail)

    def _handle(self, n: int) -> Handle:
        handle = self._slot.handle
        if handle is None or handle.used < n:
            raise CellsGone("the cells of the slot were lost with a device")
        return handle

    def release(self) -> None:
        """End the job. Any thread."""
        self._queue.release_held(self._slot)


class Job(threading.Thread):
    """Thread that saves or restores one slot."""

    def __init__(
        self,
        slot_task: SlotTask,
        held: SlotHold,
        calls: CallQueue,
        n_adapters: int,
    ) -> None:
        super().__init__(name=f"llamado-slot-{slot_task.id_slot}", daemon=True)
        assert slot_task.path is not None
        self._slot_task, self._path = slot_task, slot_task.path
        self._held, self._calls = held, calls
        self._n_adapters = n_adapters

    def run(self) -> None:
        began = time.perf_counter()
        future = self._slot_task.future
        try:
            n_tokens, size = self._save() if self._slot_task.kind == "save" else self._restore()
        except BaseException as error:
            if not isinstance(error, LlamadoError):
                log.exception("slot %d: %s failed", self._slot_task.id_slot, self._slot_task.kind)
            self._held.release()
            future.set_exception(error)
            return
        self._held.release()
        future.set_result(SlotFile(n_tokens, size, time.perf_counter() - began))

    def _save(self) -> tuple[int, int]:
        kind = self._held.cell_kind(self._calls.call(self._held.scales))
        piece = piece_cells(kind.memory.token_bytes)
        tokens = self._calls.call(self._held.tokens)

        def pieces() -> Iterator[Cells]:
            for start in range(0, tokens.size, piece):
                n = min(piece, tokens.size - start)
                yield self._calls.call(lambda start=start, n=n: self._held.read(start, n))  # type: ignore[misc]

        for attempt in range(_ATTEMPTS):
            try:
                tail = self._calls.call(lambda: self._held.read_tail(tokens.size))
                snapshots = {
                    n: self._calls.call(lambda n=n: self._held.snapshot(n))  # type: ignore[misc]
                    for n in self._calls.call(self._held.points)
                }
                return tokens.size, write_slot(self._path, kind, tokens, tail, pieces(), piece, snapshots)
            except (DeviceLost, CellsGone):
                if attempt == _ATTEMPTS - 1:
                    raise
                # the sequence is known: its cells are computed again when the device is back
                self._calls.call(lambda: self._held.rebuild(tokens)).result()
        raise AssertionError

    def _restore(self) -> tuple[int, int]:
        with SlotReader(
            self._path,
            self._held.cell_kind,
            n_ctx=self._held.n_ctx,
            n_vocab=self._held.n_vocab,
            n_adapters=self._n_adapters,
        ) as file:
            for attempt in range(_ATTEMPTS):
                try:
                    self._calls.call(lambda: self._held.make_room(file.tokens.size, file.scales))
                    self._calls.call(lambda: self._held.write_tail(file.tokens.size, file.tail))
                    for start, n, cells in file.pieces():
                        self._put(file.tokens[start : start + n], cells)
                    for n, tail in file.snapshots.items():
                        self._calls.call(lambda n=n, tail=tail: self._held.put_snapshot(n, tail))  # type: ignore[misc]
                    break
                except (DeviceLost, CellsGone):
                    if attempt == _ATTEMPTS - 1:
                        raise
            return file.tokens.size, file.size

    def _put(self, tokens: Tokens, cells: Cells) -> None:
        self._calls.call(lambda: self._held.write(tokens, cells))
