"""Times of batches over the last minute: computing, on links, waiting."""

from __future__ import annotations

import time
from collections import deque
from threading import Lock
from typing import NamedTuple

_WINDOW = 60.0
_MOST = 4096


class PartTime(NamedTuple):
    """The time of a part of a batch on one device."""

    ended: float
    """time.monotonic()"""
    device: int
    seconds: float
    """From sending it, or from the end of the part before it there, to receiving its results."""
    waited: float
    """Seconds behind other batches, for the device's thread and on the device."""
    n_bytes: int
    """Bytes in both directions."""
    trips: float = 1.0
    """Round trips of messages within those seconds: half of one more if results go to the next device, and one less if
    its inputs came from the previous device, because seconds are then counted from their arrival.
    """
    computed: float | None = None
    """Seconds of computing, if the device reported them."""


class BatchTime(NamedTuple):
    """The time of a batch from start to end."""

    ended: float
    seconds: float
    n_rows: int
    """Rows of logits."""


class Times:
    """Collects times from many threads; each record costs about a microsecond."""

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
        """Record the end of a part that was queued for its device at `queued` and sent at `began`
        (time.monotonic()).
        """
        now = time.monotonic()
        with self._lock:
            first = max(began, min(self._ends.get(device, 0.0), now))
            self._ends[device] = now
            self._parts.append(PartTime(now, device, now - first, first - queued, n_bytes, trips, computed))

    def batch(self, began: float, n_rows: int) -> None:
        """Record the end of a batch."""
        now = time.monotonic()
        with self._lock:
            self._batches.append(BatchTime(now, now - began, n_rows))

    def forget(self) -> None:
        """Drop all records, because layers moved."""
        with self._lock:
            self._parts.clear()
            self._batches.clear()

    def parts(self) -> list[PartTime]:
        """Return the parts of the last minute, oldest first."""
        after = time.monotonic() - _WINDOW
        with self._lock:
            return [part for part in self._parts if part.ended >= after]

    def batches(self) -> list[BatchTime]:
        """Return the batches of the last minute, oldest first."""
        after = time.monotonic() - _WINDOW
        with self._lock:
            return [batch for batch in self._batches if batch.ended >= after]
