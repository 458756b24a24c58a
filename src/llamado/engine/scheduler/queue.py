"""Queues of the engine: requests, and tasks that save, restore or erase a slot."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from llamado.devices.device import DeviceLost
from llamado.engine.errors import EngineClosed, QueueFull
from llamado.engine.request import Event, Failure
from llamado.engine.scheduler.slots import Slot, Task
from llamado.errors import LlamadoError

log = logging.getLogger(__name__)

T = TypeVar("T")

# Requests that determine the pace, and the most seconds of a Retry-After.
_PACE_REQUESTS, _LONGEST_WAIT = 64, 60


class SlotTask:
    """A task for a slot, done once the slot is free."""

    __slots__ = ("future", "id_slot", "kind", "path", "t_submit")

    def __init__(self, kind: Literal["save", "restore", "erase"], id_slot: int, path: Path | None = None) -> None:
        self.kind = kind
        self.id_slot = id_slot
        self.path = path
        self.future: Future[Any] = Future()
        self.t_submit = time.monotonic()


class CallQueue:
    """Functions of other threads that the engine's thread runs between two steps."""

    def __init__(self, wake: threading.Condition) -> None:
        self._wake = wake
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closed: LlamadoError | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread; return or raise its result."""
        future: Future[T] = Future()
        with self._wake:
            if self._closed is not None:
                raise self._closed
            self._waiting.append((function, future))
            self._wake.notify()
        return future.result()

    def run(self) -> DeviceLost | None:
        """Run the waiting functions. Return the loss of a device if one of them met it."""
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
        """Fail the waiting functions, and with `for_good` all future ones."""
        with self._wake:
            if for_good:
                self._closed = error
            while self._waiting:
                self._waiting.popleft()[1].set_exception(error)


class Queue:
    """Accepts requests and slot tasks from any thread; everything else is for the engine's thread.

    At most `most` requests wait for a slot. `wake` is notified of everything the engine may wait for.
    """

    def __init__(self, slots: Sequence[Slot], most: int) -> None:
        self.slots = slots
        self._most = most
        self.wake = threading.Condition()
        self._inbox: deque[Task] = deque()
        self._outbox: list[tuple[Task, Event]] = []
        self.tasks: dict[int, Task] = {}
        """Requests that are not over, by id."""
        self._next_id = 0
        self.closing = False
        self.deadline = math.inf
        """Time (time.monotonic()) at which running requests are cut off."""
        self.waiting: list[Task] = []
        """Requests that wait for a slot. Engine's thread only."""
        self.slot_tasks: deque[SlotTask] = deque()
        self.n_over = 0
        """Number of requests that left their slots."""
        self.ends: deque[float] = deque(maxlen=_PACE_REQUESTS)
        """End times of the last requests."""

    # -- any thread --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `QueueFull` if one more request is too many."""
        n_waiting = len(self.tasks) - len(self.slots)
        if n_waiting < self._most:
            return
        # rejected clients come back together: half of the queue should be gone by then
        ends = self.ends
        seconds = (time.monotonic() - ends[0]) * max(1, self._most) / (2 * len(ends)) if ends else 1.0
        raise QueueFull(max(0, n_waiting), min(max(math.ceil(seconds), 1), _LONGEST_WAIT))

    def add(self, task: Task) -> None:
        """Add a request. Raises EngineClosed."""
        with self.wake:
            self._check_open()
            self._register(task)
            self._inbox.append(task)
            self.wake.notify()

    def add_slot_task(self, slot_task: SlotTask) -> None:
        """Add a task for a slot. Raises QueueFull and EngineClosed."""
        if len(self.slot_tasks) >= max(1, self._most):
            raise QueueFull(len(self.slot_tasks), 1)
        with self.wake:
            self._check_open()
            self.slot_tasks.append(slot_task)
            self.wake.notify()

    def _check_open(self) -> None:
        if self.closing:
            raise EngineClosed("the server is shutting down and takes no more requests")

    def _register(self, task: Task) -> None:
        task.id, task.outbox = self._next_id, self._outbox
        self._next_id += 1
        self.tasks[task.id] = task

    def cancel(self, task_id: int) -> None:
        """Cancel a task; one that is over or unknown is ignored."""
        with self.wake:
            task = self.tasks.get(task_id)
            if task is not None:
                task.cancelled = True
                self.wake.notify()

    def close(self, timeout: float) -> None:
        """Accept nothing more, and cut off everything that is not done in `timeout` seconds."""
        with self.wake:
            self.closing = True
            self.deadline = min(self.deadline, time.monotonic() + timeout)
            self.wake.notify()

    def notify(self) -> None:
        """Wake the engine, which may be idle."""
        with self.wake:
            self.wake.notify()

    def release_held(self, slot: Slot) -> None:
        """Release a held slot."""
        with self.wake:
            slot.t_last_used = time.perf_counter()
            slot.held = False
            self.wake.notify()

    # -- the engine thread -------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """True if nothing waits for a slot."""
        return not (self._inbox or self.waiting or self.slot_tasks)

    @property
    def has_arrivals(self) -> bool:
        """True if requests arrived since `receive`."""
        return bool(self._inbox)

    @property
    def n_deferred(self) -> int:
        return len(self.waiting) + len(self._inbox) + len(self.slot_tasks)

    def enter(self, task: Task) -> None:
        """Add a request of the engine itself, which waits for no slot."""
        with self.wake:
            self._register(task)

    def receive(self) -> None:
        """Take over new requests; `wake` must be held."""
        self.waiting.extend(self._inbox)
        self._inbox.clear()

    def deliver(self, *, wait: bool = False) -> None:
        """Send the waiting events to their receivers; `wait`: give these time to handle them (see Engine.submit)."""
        if not self._outbox:
            return
        events = self._outbox.copy()
        self._outbox.clear()
        for task, event in events:
            if task.cancelled:
                continue
            try:
                task.emit(event)
            except Exception:
                # the receiver cannot get any more events
                log.exception("the receiver of task %d failed; the task is dropped", task.id)
                task.cancelled = True
        if wait:
            for flush in {task.flush for task, _ in events if not task.cancelled}:
                if flush is not None:
                    flush()

    def release(self, slot: Slot) -> None:
        """End the slot's request."""
        if slot.task is not None:
            self.tasks.pop(slot.task.id, None)
            self.ends.append(time.monotonic())
            self.n_over += 1
        slot.release()

    def fail(self, slot: Slot, error: LlamadoError) -> None:
        """Fail the slot's request with an error."""
        task = slot.task
        assert task is not None
        self.release(slot)
        task.queue_event(Failure(error))

    def drop_cancelled(self) -> bool:
        """Drop cancelled requests. Return True if there were any."""
        changed = False
        for slot in self.slots:
            if slot.task is not None and slot.task.cancelled:
                self.release(slot)
                changed = True
        if any(task.cancelled for task in self.waiting):
            for task in self.waiting:
                if task.cancelled:
                    self.tasks.pop(task.id, None)
            self.waiting = [task for task in self.waiting if not task.cancelled]
            changed = True
        return changed

    def reject_waiting(self, error: LlamadoError, seconds: float, since: float) -> None:
        """Reject tasks that have waited `seconds` for a slot, not counting the time before `since`."""
        now = time.monotonic()
        for task in [task for task in self.waiting if now - max(task.t_submit, since) >= seconds]:
            self.waiting.remove(task)
            self.tasks.pop(task.id, None)
            task.queue_event(Failure(error))
        late = [slot_task for slot_task in self.slot_tasks if now - max(slot_task.t_submit, since) >= seconds]
        for slot_task in late:
            self.slot_tasks.remove(slot_task)
        self.deliver()
        _fail_all(deque(late), error)

    def fail_all(self, error: LlamadoError) -> None:
        """Fail everything, in slots or not."""
        for slot in self.slots:
            if slot.task is not None:
                self.fail(slot, error)
        with self.wake:
            waiting = [*self.waiting, *self._inbox]
            self._inbox.clear()
        self.waiting = []
        for task in waiting:
            self.tasks.pop(task.id, None)
            task.queue_event(Failure(error))
        _fail_all(self.slot_tasks, error)


def _fail_all(slot_tasks: deque[SlotTask], error: LlamadoError) -> None:
    """Fail all of these tasks."""
    while slot_tasks:
        with suppress(Exception):  # it was cancelled
            slot_tasks.popleft().future.set_exception(error)
