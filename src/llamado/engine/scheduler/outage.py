"""Outages: pause the engine while a device is lost, and resume when it is back or its layers have moved."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from llamado.devices.device import DeviceLost, WorkerLost
from llamado.devices.split.placement import SplitOptions
from llamado.engine.errors import Unavailable
from llamado.engine.forward.contract import Recovery
from llamado.engine.request import Fault
from llamado.engine.scheduler.queue import CallQueue, Queue
from llamado.errors import LlamadoError

log = logging.getLogger(__name__)

# Pauses between reconnection attempts, in seconds. They grow with the time since the loss, so that waiting for the next
# attempt delays the return of a device by at most this share.
_FIRST_PAUSE, _LONGEST_PAUSE, _PAUSE_SHARE = 0.1, 5.0, 0.25
# seconds between attempts to move layers back, after a failed one
_FIRST_REST, _LONGEST_REST = 5.0, 600.0
# seconds between checks for requests that arrived, were cancelled or have waited long enough
_LOOK_SECONDS = 0.02


class OutageHandler:
    """Tracks lost devices, and pauses the engine's thread while there is one."""

    def __init__(self, recovery: Recovery, queue: Queue, calls: CallQueue, options: SplitOptions) -> None:
        self._recovery = recovery
        self._queue = queue
        self._calls = calls
        self._failover, self._wait = options.failover, options.request_wait
        self._void: DeviceLost | None = None
        self.fault: Fault | None = None
        """The loss that the engine waits for, for status requests."""
        self._returning: _ReturnWatcher | None = None

    def note(self, lost: DeviceLost) -> None:
        """Record a loss."""
        self._void = lost

    def current_loss(self) -> DeviceLost | None:
        """Return the present loss, detected by the forward pass or by one of its batches."""
        return self._recovery.lost() or self._void

    def pause(self, lost: DeviceLost, forget: Callable[[], None], changed: Callable[[], None]) -> None:
        """Drop all cells, and retry until all devices are back, or the engine closes; answers continue at their last
        token.

        `changed` is called whenever the visible state changes.
        """
        end = "it is back" if isinstance(lost, WorkerLost) else "it is opened again or its layers have moved"
        log.error("%s; answers wait until %s", lost.as_logged(), end)
        self.fault = Fault(lost.device, lost.why, time.time(), lost.kind)
        forget()
        changed()
        began = time.monotonic()
        while not self._queue.closing:
            late = self._failover is not None and time.monotonic() - began >= self._failover
            attempt = _Attempt(self._recovery, elsewhere=late)
            self._idle_until(lambda attempt=attempt: not attempt.is_alive(), began, changed)  # type: ignore[misc]
            if attempt.is_alive():
                return  # closing; the attempt need not be waited for
            if attempt.error is None:
                self._log_outcome(time.monotonic() - began)
                break
            if isinstance(attempt.error, DeviceLost):
                self.fault = self.fault._replace(device=attempt.error.device, why=attempt.error.why)
            else:
                self.fault = self.fault._replace(why=str(attempt.error))
            changed()
            now = time.monotonic()
            until = now + min(max(_FIRST_PAUSE, _PAUSE_SHARE * (now - began)), _LONGEST_PAUSE)
            if self._failover is not None and not late:
                until = min(until, began + self._failover)
            self._idle_until(lambda until=until: time.monotonic() >= until, began, changed)  # type: ignore[misc]
        self.fault = self._void = None
        if self._recovery.away():
            if self._returning is None:
                self._returning = _ReturnWatcher(self._recovery, self._queue)
            self._returning.needed.set()

    def _log_outcome(self, seconds: float) -> None:
        away = self._recovery.away()
        if not away:
            log.info("devices: all back after %.1f s", seconds)
            return
        names = " and ".join(device.device for device in away)
        log.warning("continuing without %s after %.1f s; its layers move back when it returns", names, seconds)

    @property
    def returned(self) -> bool:
        """True if a device whose layers moved to others can have them back."""
        return self._returning is not None and self._returning.ready.is_set()

    def move_back(self, forget: Callable[[], None]) -> None:
        """Drop all cells, and give returned devices their layers; answers continue at their last token."""
        assert self._returning is not None
        began = time.monotonic()
        forget()
        moved = False
        try:
            self._recovery.move_back()
            moved = True
        except LlamadoError as error:
            log.warning("layers: not moved back: %s", error)
        except Exception:
            log.exception("layers: moving back failed")
        if moved and not self._recovery.away():
            log.info("devices: all back; moving layers took %.1f s", time.monotonic() - began)
        self._returning.finish_move(moved)

    def _idle_until(self, over: Callable[[], bool], began: float, changed: Callable[[], None]) -> None:
        """Reject requests that have waited too long and drop cancelled ones, until `over` or the engine closes.

        `began`: when the device was lost; earlier waiting for other requests does not count.
        """
        queue = self._queue
        while not over() and not queue.closing:
            with queue.wake:
                queue.wake.wait(_LOOK_SECONDS)
                queue.receive()
            queue.drop_cancelled()
            assert self.fault is not None
            error = Unavailable(self.fault.message)
            queue.reject_waiting(error, self._wait, began)
            if time.monotonic() - began >= self._wait:
                self._calls.fail(error)
            changed()


class _ReturnWatcher(threading.Thread):
    """Thread that reconnects devices whose layers moved to others. `ready`: some can have their layers back."""

    def __init__(self, recovery: Recovery, queue: Queue) -> None:
        super().__init__(name="llamado-return", daemon=True)
        self._recovery, self._queue = recovery, queue
        self.needed = threading.Event()
        """Set when layers moved to other devices."""
        self.ready = threading.Event()
        self._answered = threading.Event()
        self._rest = 0.0  # seconds before the next move after a failed one: each move voids all cells
        self.start()

    def run(self) -> None:
        began, reported = time.monotonic(), ""
        while not self._queue.closing:
            if not self._recovery.away():
                self.needed.wait(_LONGEST_PAUSE)
                self.needed.clear()
                began, reported = time.monotonic(), ""
                continue
            time.sleep(min(max(_FIRST_PAUSE, _PAUSE_SHARE * (time.monotonic() - began)), _LONGEST_PAUSE))
            try:
                if not self._queue.closing:
                    self._recovery.call_back()
            except DeviceLost:
                continue
            except Exception as error:
                if str(error) != reported:
                    reported = str(error)
                    log.warning("a device is back, but cannot be used: %s", reported, exc_info=not _is_ours(error))
                continue
            self._pause(self._rest)
            self._answered.clear()
            self.ready.set()
            self._queue.notify()
            while not self._answered.wait(_LONGEST_PAUSE) and not self._queue.closing:
                pass

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._queue.closing:
            time.sleep(min(1.0, seconds))

    def finish_move(self, moved: bool) -> None:
        """Continue after the engine tried to move layers."""
        self._rest = 0.0 if moved else min(max(_FIRST_REST, 2 * self._rest), _LONGEST_REST)
        self.ready.clear()
        self._answered.set()


def _is_ours(error: Exception) -> bool:
    return isinstance(error, LlamadoError)


class _Attempt(threading.Thread):
    """One attempt of a forward pass to get its devices back, on a thread of its own because it may take long."""

    def __init__(self, recovery: Recovery, *, elsewhere: bool) -> None:
        super().__init__(name="llamado-restore", daemon=True)
        self._recovery, self._elsewhere = recovery, elsewhere
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._recovery.restore(self._elsewhere)
        except Exception as error:
            if not isinstance(error, LlamadoError):
                log.exception("restoring failed")
            self.error = error
