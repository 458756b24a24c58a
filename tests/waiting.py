"""Waiting in tests: for a condition, never for a time that ought to suffice.

`GUARD` ends a test that would wait forever. Nothing may depend on it: a busy machine takes as long as it takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

GUARD = 120.0
"""Seconds."""


class _Wait:
    """Growing pauses between looks, until `GUARD` is over."""

    def __init__(self, failure: str | Callable[[], str]) -> None:
        self._failure = failure
        self._began = time.monotonic()

    def pause(self) -> float:
        """Seconds until the next look. Raises AssertionError after `GUARD` seconds."""
        waited = time.monotonic() - self._began
        if waited > GUARD:
            raise AssertionError(self._failure if isinstance(self._failure, str) else self._failure())
        return min(0.001 + waited / 20, 0.02)


def until(condition: Callable[[], T], failure: str | Callable[[], str] = "it did not happen") -> T:
    """Return the condition's value once it is true. Fails with `failure` after `GUARD` seconds."""
    wait = _Wait(failure)
    while not (value := condition()):
        time.sleep(wait.pause())
    return value


async def until_async(condition: Callable[[], T], failure: str | Callable[[], str] = "it did not happen") -> T:
    """`until` that leaves the event loop free meanwhile."""
    wait = _Wait(failure)
    while not (value := condition()):
        await asyncio.sleep(wait.pause())
    return value
