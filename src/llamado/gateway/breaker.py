"""Circuit breaking: a replica that fails again and again is left alone for a while, then tried with one request."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

FAILURES = 3
"""Failures in a row that open the circuit."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds an open circuit stays so: twice as long after each probe that failed."""


class Circuit(enum.Enum):
    """Whether requests may pass."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The circuit of one replica. `clock`: seconds, never going back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._until: float | None = None
        self._probing = False

    @property
    def state(self) -> Circuit:
        """How it stands now."""
        if self._until is None:
            return Circuit.CLOSED
        return Circuit.OPEN if self._clock() < self._until else Circuit.HALF_OPEN

    @property
    def lets_through(self) -> bool:
        """Whether a request may be sent: none while open, one at a time while half open."""
        state = self.state
        return state is Circuit.CLOSED or (state is Circuit.HALF_OPEN and not self._probing)

    def begin(self) -> bool:
        """A request is sent; returns whether it is the probe of a half-open circuit."""
        probe = self.state is Circuit.HALF_OPEN and not self._probing
        self._probing = self._probing or probe
        return probe

    def reset(self) -> None:
        """It is another process now."""
        self.succeeded(probe=True)

    def succeeded(self, probe: bool) -> None:
        """A request was answered. One sent before the circuit opened tells nothing about now."""
        if self._until is None or probe:
            self._failures = 0
            self._pause = FIRST_PAUSE
            self._until = None
            self._probing = False

    def failed(self, probe: bool) -> None:
        """A request was not answered, or with an error of the server's."""
        self._failures += 1
        if probe:
            self._probing = False
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._until = self._clock() + self._pause
        elif self._until is None and self._failures >= FAILURES:
            self._until = self._clock() + self._pause

    def forgotten(self, probe: bool) -> None:
        """A request ended without telling anything: its client went away."""
        if probe:
            self._probing = False
