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


class Hold:
    """See slot_io.Held."""

    def __init__(self, slot: Slot, forward: Forward, sequences: Sequences, queue: Queue) -> None:
        slot.held = True
        self._slot = slot
        self._forward = forward
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
        run = self._slot.run
        if run is None or run.used < start + n:
            raise CellsGone("the cells of the slot were lost with a device")
        return self._forward.read_cells(run.start + start, n)

    def make_room(self, n: int, scales: Scales) -> None:
        self._sequences.empty(self._slot, n, scales)

    def write(self, tokens: NDArray[np.int32], cells: Cells) -> None:
        run, slot = self._slot.run, self._slot
        if run is None:
            raise CellsGone("the cells of the slot were lost with a device")
        used = run.used
        self._forward.write_cells(run.start + used, tokens.size, cells)
        slot.tokens[used : used + tokens.size] = tokens
        run.used = slot.length = used + tokens.size

    def release(self) -> None:
        self._queue.let_go(self._slot)
