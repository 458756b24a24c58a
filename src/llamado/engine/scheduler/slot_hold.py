"""A slot that is held, for the job that saves or restores it."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from llamado.engine.forward.contract import Cells, Forward, Scales
from llamado.engine.request import Done, Event, Failed, Request
from llamado.engine.sampling.chain import Sampler
from llamado.engine.sampling.params import Sampling
from llamado.engine.scheduler.prefix import Sequences
from llamado.engine.scheduler.queue import Queue
from llamado.engine.scheduler.slot_io import CellsGone
from llamado.engine.scheduler.slots import Slot
from llamado.models.memory import Handle


class Hold:
    """See slot_io.Held."""

    def __init__(self, slot: Slot, forward: Forward, sequences: Sequences, queue: Queue) -> None:
        slot.held = True
        self._slot = slot
        self._forward = forward
        self._memory = forward.memory
        self._sequences = sequences
        self._queue = queue

    def tokens(self) -> NDArray[np.int32]:
        return self._slot.tokens[: self._slot.used].copy()

    def scales(self) -> Scales:
        return self._slot.scales

    def rebuild(self, tokens: NDArray[np.int32]) -> Future[None]:
        done: Future[None] = Future()

        def emit(event: Event) -> None:
            if isinstance(event, Done):
                done.set_result(None)
            elif isinstance(event, Failed):
                done.set_exception(event.error)

        request = Request(prompt=tokens.tolist(), n_predict=0)
        sampler = Sampler(Sampling(), seed=0, n_vocab=self._forward.n_vocab)
        task = self._queue.enter(request, emit, sampler=sampler, seed=0, scales=self._slot.scales)
        self._sequences.begin(self._slot, task, tokens)
        return done

    def read(self, start: int, n: int) -> Cells:
        return self._memory.read(self._handle(start + n), start, n)

    def read_tail(self, n: int) -> Cells:
        return self._memory.read_tail(self._handle(n), n) if n else np.empty(0, np.uint8)

    def make_room(self, n: int, scales: Scales) -> None:
        self._sequences.empty(self._slot, n, scales)

    def write(self, tokens: NDArray[np.int32], cells: Cells) -> None:
        slot, handle = self._slot, self._handle(0)
        used = handle.used
        self._memory.write(handle, tokens.size, cells)
        slot.tokens[used : used + tokens.size] = tokens
        slot.length = handle.used

    def write_tail(self, n: int, tail: Cells) -> None:
        if n:
            self._memory.write_tail(self._handle(0), n, tail)

    def _handle(self, n: int) -> Handle:
        handle = self._slot.handle
        if handle is None or handle.used < n:
            raise CellsGone("the cells of the slot were lost with a device")
        return handle

    def release(self) -> None:
        self._queue.let_go(self._slot)
