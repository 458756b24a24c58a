"""Where the time of batches goes: computing, on links, waiting; of the last minute."""

from __future__ import annotations

import time
from collections import deque
from threading import Lock
from typing import NamedTuple

_WINDOW = 60.0
_MOST = 4096


class PartTime(NamedTuple):
    """A part of a batch on one device."""

    ended: float
    """time.monotonic()"""
    device: int
    seconds: float
    """From being sent, or from the end of the part before it there, to having its results."""
    waited: float
    """Seconds behind other batches, for the device's thread and on the device."""
    n_bytes: int
    """Bytes that went there and came back."""
    trips: float = 1.0
    """Round trips of messages among those seconds: half of one more where results go to the next device, and one less
    where what it works on came from the one before, as seconds are then counted from its arrival.
    """
    computed: float | None = None
    """Seconds that it computed, where somebody told."""


class BatchTime(NamedTuple):
    """A batch from its start to its end."""

    ended: float
    seconds: float
    n_rows: int
    """Rows of logits it gave."""


class Times:
    """Takes notes from many threads; each costs about a microsecond."""

    def __init__(self) -> None:
        self._parts: deque[PartTime] = deque(maxlen=_MOST)
        self._batches: deque[BatchTime] = deque(maxlen=_MOST)
        self._ends: dict[int, float] = {}
        self._lock = Lock()

    def part(
        self,
        device: int,
        queued: float,
        began: float,
        n_bytes: int,
        *,
        trips: float = 1.0,
        computed: float | None = None,
    ) -> None:
        """A part came to its end that was handed to its device at `queued` and sent at `began` (time.monotonic())."""
        now = time.monotonic()
        with self._lock:
            first = max(began, min(self._ends.get(device, 0.0), now))
            self._ends[device] = now
            self._parts.append(PartTime(now, device, now - first, first - queued, n_bytes, trips, computed))

    def batch(self, began: float, n_rows: int) -> None:
        """A batch came to its end."""
        now = time.monotonic()
        with self._lock:
            self._batches.append(BatchTime(now, now - began, n_rows))

    def forget(self) -> None:
        """What was noted is of no use any more: layers are elsewhere."""
        with self._lock:
            self._parts.clear()
            self._batches.clear()

    def parts(self) -> list[PartTime]:
        """Those of the last minute, oldest first."""
        after = time.monotonic() - _WINDOW
        with self._lock:
            return [part for part in self._parts if part.ended >= after]

    def batches(self) -> list[BatchTime]:
        """Those of the last minute, oldest first."""
        after = time.monotonic() - _WINDOW
        with self._lock:
            return [batch for batch in self._batches if batch.ended >= after]
