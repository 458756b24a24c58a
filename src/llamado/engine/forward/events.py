"""What happens to devices: who was lost, came back, joined or was drained, and whose layers moved."""

from __future__ import annotations

import time
from collections import deque
from typing import Literal, NamedTuple

EventKind = Literal["joined", "drained", "lost", "back", "moved"]

_HOUR = 3600.0
_MOST_EVENTS = 1000


class ClusterEvent(NamedTuple):
    """Something that happened to a device."""

    at: float
    """Seconds since 1970."""
    kind: EventKind
    device: str
    what: str
    """In words."""


class Events:
    """What happened in the last hour; any thread."""

    def __init__(self) -> None:
        self._events: deque[ClusterEvent] = deque(maxlen=_MOST_EVENTS)
        self.count = 0
        """Of all events there ever were."""

    def add(self, kind: EventKind, device: str, what: str) -> None:
        self._events.append(ClusterEvent(time.time(), kind, device, what))
        self.count += 1

    def recent(self) -> tuple[ClusterEvent, ...]:
        """Oldest first."""
        after = time.time() - _HOUR
        return tuple(event for event in tuple(self._events) if event.at >= after)
