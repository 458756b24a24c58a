"""Server states derived from `/health` responses. No I/O.

Three properties are distinguished. *Liveness*: the server answers HTTP. *Readiness*: `/health` returns 200 and `ok`.
*Workload*: a slot is free. An accepted connection proves none of them.
"""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamado.numerals import whole_number


class Phase(enum.Enum):
    """Phase of a server's life."""

    CONNECTING = "connecting"
    """No answer yet."""
    LOADING = "loading"
    READY = "ready"
    BUSY = "busy"
    """Ready, but every slot is processing a request."""
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class State:
    """A phase with its details."""

    phase: Phase
    message: str
    """Human-readable description, with a remedy if one is known."""
    progress: float | None = None
    """Fraction of the model that is loaded, from 0 to 1; None if the server does not report it."""
    retry_after: float | None = None
    """Seconds to wait before the next request, from Retry-After."""

    @property
    def ready(self) -> bool:
        """True if the server accepts requests."""
        return self.phase in (Phase.READY, Phase.BUSY)

    @property
    def alive(self) -> bool:
        """True if the server answers, even while it loads."""
        return self.ready or self.phase is Phase.LOADING


CONNECTING = State(Phase.CONNECTING, "not asked yet")
MAX_BODY = 1 << 16
"""Most bytes read of a response; a `/health` body is shorter than one kilobyte."""


def judge(status: int, headers: Mapping[str, str], body: bytes) -> State:
    """Return the state that a `/health` response describes.

    Bodies are llama-server's: `{"status": "ok"}`; 503 `{"error": {"message": "Loading model", …}}`, to which ours adds
    `progress` and `stage`; those of older ones, `{"status": "loading model"}` and `{"status": "no slot available"}`.
    """
    again = _retry_after(headers.get("retry-after"))
    said = _object(body)
    status_text = said.get("status")
    error = said.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    if status_text == "no slot available" or message == "no slot available":
        return State(Phase.BUSY, "ready, and all slots are at work", retry_after=again)
    if status == 200:
        if status_text == "ok":
            return State(Phase.READY, "ready", retry_after=again)
        return State(Phase.UNHEALTHY, "something else answers there: /health is not a llama server's", None, again)
    if status == 503:
        if status_text == "loading model":
            return State(Phase.LOADING, "Loading model", None, again)
        if isinstance(message, str):
            if not message.startswith("Loading model"):
                return State(Phase.UNHEALTHY, message, None, again)
            progress, stage = said.get("progress"), said.get("stage")
            known = isinstance(progress, (int, float)) and 0 <= progress <= 1
            text = f"{message}: {stage}" if isinstance(stage, str) and stage else message
            return State(Phase.LOADING, text, float(progress) if known else None, again)  # type: ignore[arg-type]
        return State(Phase.UNHEALTHY, "answers 503 without a reason: a proxy whose server is away?", None, again)
    if isinstance(message, str):
        return State(Phase.UNHEALTHY, f"/health answers {status}: {message}", None, again)
    return State(Phase.UNHEALTHY, f"/health answers {status}: this is no llama server, or not its address", None, again)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header. The form with a date is rare and not supported."""
    seconds = None if value is None else whole_number(value.strip())
    return None if seconds is None else float(min(seconds, 3600))


class Backoff:
    """Exponential backoff: pauses double from `first` to `longest` seconds, each shortened by up to a quarter."""

    def __init__(self, first: float, longest: float, rng: random.Random | None = None) -> None:
        self._first, self._longest = first, longest
        self._next = first
        self._rng = rng if rng is not None else random.Random()

    def pause(self, retry_after: float | None = None) -> float:
        """Return the seconds to wait before the next attempt, at least `retry_after`."""
        seconds = self._next * self._rng.uniform(0.75, 1.0)
        self._next = min(2 * self._next, self._longest)
        return max(seconds, retry_after or 0.0)

    def reset(self) -> None:
        """Start again with the shortest pause."""
        self._next = self._first


class StartupWatch:
    """History of a server's states while it starts, which reveals what a single state cannot: a crash while loading."""

    # Seconds. A /health request costs a server well under a millisecond, and a ready server should be noticed soon.
    FIRST, LONGEST = 0.02, 0.16
    LEAST = 1.0

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.state = CONNECTING
        self._backoff = Backoff(self.FIRST, self.LONGEST)
        self._was_loading = False

    def note(self, found: State) -> State:
        """Record a state and return it, as UNHEALTHY if a server that was loading has stopped answering."""
        if found.phase is Phase.LOADING:
            self._was_loading = True
        elif found.phase is Phase.CONNECTING and self._was_loading:
            found = State(Phase.UNHEALTHY, f"it was loading the model and is gone ({found.message}); its log tells why")
        if found.phase is not self.state.phase:
            self._backoff.reset()
        self.state = found
        return found

    def look_timeout(self, elapsed: float, most: float) -> float:
        """Return the timeout of the next check in seconds: at most `most`, and at most the time left.

        The last check gets at least LEAST seconds: a shorter timeout fails on any busy machine.
        """
        return min(most, max(self.LEAST, self.timeout - elapsed))

    def pause(self, elapsed: float) -> float | None:
        """Return the seconds until the next check, or None if the time is over."""
        left = self.timeout - elapsed
        if left <= 0:
            return None
        return min(self._backoff.pause(self.state.retry_after), left)
