"""Circuit breaker: a replica that fails repeatedly gets no requests for a while, then one probe request."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

FAILURES = 3
"""Failures in a row that open the circuit."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds an open circuit stays open; doubles with each failed probe."""


class Circuit(enum.Enum):
    """State of a circuit."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The circuit of one replica. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._until: float | None = None
        self._probing = False

    @property
    def state(self) -> Circuit:
        """The current state."""
        if self._until is None:
            return Circuit.CLOSED
        return Circuit.OPEN if self._clock() < self._until else Circuit.HALF_OPEN

    @property
    def allows_request(self) -> bool:
        """True if a request may be sent: none while open, one at a time while half open."""
        state = self.state
        return state is Circuit.CLOSED or (state is Circuit.HALF_OPEN and not self._probing)

    def begin(self) -> bool:
        """Count a request; return True if it is the probe of a half-open circuit."""
        probe = self.state is Circuit.HALF_OPEN and not self._probing
        self._probing = self._probing or probe
        return probe

    def reset(self) -> None:
        """Close the circuit: the replica was restarted."""
        self.record_success(probe=True)

    def record_success(self, probe: bool) -> None:
        """Count a response. One to a request from before the circuit opened is outdated and ignored."""
        if self._until is None or probe:
            self._failures = 0
            self._pause = FIRST_PAUSE
            self._until = None
            self._probing = False

    def record_failure(self, probe: bool) -> None:
        """Count a request without a response, or with a server error."""
        self._failures += 1
        if probe:
            self._probing = False
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._until = self._clock() + self._pause
        elif self._until is None and self._failures >= FAILURES:
            self._until = self._clock() + self._pause

    def release_probe(self, probe: bool) -> None:
        """Ignore a request that ended without a verdict, because its client disconnected."""
        if probe:
            self._probing = False
