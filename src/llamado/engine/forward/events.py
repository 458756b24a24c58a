"""Cluster events: devices lost, back, joined or drained, and moved layers."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["joined", "drained", "lost", "back", "moved"]

_HOUR = 3600.0
_MOST_EVENTS = 1000


@dataclass(frozen=True)
class ClusterEvent:
    """An event of a device."""

    at: float
    """Seconds since 1970."""
    kind: EventKind
    device: str
    what: str
    """A description."""


class Events:
    """The events of the last hour. Any thread."""

    def __init__(self) -> None:
        self._events: deque[ClusterEvent] = deque(maxlen=_MOST_EVENTS)
        self.count = 0
        """Number of all events since the start."""

    def add(self, kind: EventKind, device: str, what: str) -> None:
        self._events.append(ClusterEvent(time.time(), kind, device, what))
        self.count += 1

    def recent(self) -> tuple[ClusterEvent, ...]:
        """Return the events of the last hour, oldest first."""
        after = time.time() - _HOUR
        return tuple(event for event in tuple(self._events) if event.at >= after)
