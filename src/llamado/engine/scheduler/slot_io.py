"""Work on slots besides requests: saving them to files, restoring and erasing them.

Files take long, steps must not: a thread of its own reads and writes the file, and has the engine's thread move a few
cells at a time between two steps. Meanwhile the slot is held, and no request gets it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceLost
from llamado.engine.cache.slot_file import SlotFile, SlotReader, write_slot
from llamado.engine.errors import EngineError
from llamado.engine.forward.contract import CellKind, Cells, Scales
from llamado.errors import LlamadoError

log = logging.getLogger(__name__)

T = TypeVar("T")
Tokens = NDArray[np.int32]

# Bytes of cells that are moved between two steps, and cells of a piece at most.
_PIECE_BYTES, _PIECE_CELLS = 8 << 20, 256
# How often a device may be lost while a slot is saved or restored.
_ATTEMPTS = 5


class CellsGone(EngineError):
    """The cells of a held slot were lost with a device."""


class SlotTask:
    """What somebody wants done with a slot once it is free."""

    __slots__ = ("future", "id_slot", "kind", "path", "t_submit")

    def __init__(self, kind: Literal["save", "restore", "erase"], id_slot: int, path: Path | None = None) -> None:
        self.kind = kind
        self.id_slot = id_slot
        self.path = path
        self.future: Future[Any] = Future()
        self.t_submit = time.monotonic()


class CallQueue:
    """Functions that other threads have the engine's thread run between two steps."""

    def __init__(self, wake: threading.Condition) -> None:
        self._wake = wake
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closed: LlamadoError | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def call(self, function: Callable[[], T]) -> T:
        """What the function returns or raises; waits until it ran."""
        future: Future[T] = Future()
        with self._wake:
            if self._closed is not None:
                raise self._closed
            self._waiting.append((function, future))
            self._wake.notify()
        return future.result()

    def run(self) -> DeviceLost | None:
        """Run those that wait; the loss of a device that one of them came across."""
        while self._waiting:
            function, future = self._waiting.popleft()
            try:
                result = function()
            except DeviceLost as error:
                future.set_exception(error)
                return error
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        return None

    def fail(self, error: LlamadoError, *, for_good: bool = False) -> None:
        """End those that wait, and with `for_good` those to come."""
        with self._wake:
            if for_good:
                self._closed = error
            while self._waiting:
                self._waiting.popleft()[1].set_exception(error)


class Held(Protocol):
    """A slot that a job has to itself; these run on the engine's thread, and raise DeviceLost or CellsGone."""

    def tokens(self) -> Tokens:
        """The sequence."""
        ...

    def scales(self) -> Scales:
        """How strong adapters are in its cells."""
        ...

    def rebuild(self, tokens: Tokens) -> Future[None]:
        """Have the cells of a sequence computed again."""
        ...

    def read(self, start: int, n: int) -> Cells:
        """Cells of the sequence."""
        ...

    def read_tail(self, n: int) -> Cells:
        """What layers that do not keep all tokens have of the first `n`."""
        ...

    def make_room(self, n: int, scales: Scales) -> None:
        """Forget the sequence and get `n` cells for one with these scales.

        Raises NoRoom where running answers have them.
        """
        ...

    def write(self, tokens: Tokens, cells: Cells) -> None:
        """The sequence goes on with these tokens, whose cells these are."""
        ...

    def write_tail(self, n: int, tail: Cells) -> None:
        """The tail of the `n` tokens that are written behind it."""
        ...

    def release(self) -> None:
        """The job is done; any thread."""
        ...


class Job(threading.Thread):
    """Saves or restores one slot."""

    def __init__(
        self,
        slot_task: SlotTask,
        held: Held,
        calls: CallQueue,
        kind: Callable[[Scales], CellKind],
        *,
        n_ctx: int,
        n_vocab: int,
        n_adapters: int,
    ) -> None:
        super().__init__(name=f"llamado-slot-{slot_task.id_slot}", daemon=True)
        assert slot_task.path is not None
        self._slot_task, self._path = slot_task, slot_task.path
        self._held, self._calls = held, calls
        self._kind = kind
        self._n_ctx, self._n_vocab, self._n_adapters = n_ctx, n_vocab, n_adapters

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
        kind = self._kind(self._calls.call(self._held.scales))
        piece = piece_cells(kind.memory.token_bytes)
        tokens = self._calls.call(self._held.tokens)

        def pieces() -> Iterator[Cells]:
            for start in range(0, tokens.size, piece):
                n = min(piece, tokens.size - start)
                yield self._calls.call(lambda start=start, n=n: self._held.read(start, n))  # type: ignore[misc]

        for attempt in range(_ATTEMPTS):
            try:
                tail = self._calls.call(lambda: self._held.read_tail(tokens.size))
                return tokens.size, write_slot(self._path, kind, tokens, tail, pieces(), piece)
            except (DeviceLost, CellsGone):
                if attempt == _ATTEMPTS - 1:
                    raise
                # The sequence is known: its cells are made anew when the device is there again.
                self._calls.call(lambda: self._held.rebuild(tokens)).result()
        raise AssertionError

    def _restore(self) -> tuple[int, int]:
        with SlotReader(
            self._path,
            self._kind,
            n_ctx=self._n_ctx,
            n_vocab=self._n_vocab,
            n_adapters=self._n_adapters,
        ) as file:
            for attempt in range(_ATTEMPTS):
                try:
                    self._calls.call(lambda: self._held.make_room(file.tokens.size, file.scales))
                    self._calls.call(lambda: self._held.write_tail(file.tokens.size, file.tail))
                    for start, n, cells in file.pieces():
                        self._put(file.tokens[start : start + n], cells)
                    break
                except (DeviceLost, CellsGone):
                    if attempt == _ATTEMPTS - 1:
                        raise
            return file.tokens.size, file.size

    def _put(self, tokens: Tokens, cells: Cells) -> None:
        self._calls.call(lambda: self._held.write(tokens, cells))


def piece_cells(cell_bytes: int) -> int:
    """How many cells are moved at a time."""
    return max(1, min(_PIECE_CELLS, _PIECE_BYTES // max(1, cell_bytes)))


def fail_all(slot_tasks: deque[SlotTask], error: LlamadoError) -> None:
    """None of these is done."""
    while slot_tasks:
        with suppress(Exception):  # nobody waits for it any more
            slot_tasks.popleft().future.set_exception(error)
