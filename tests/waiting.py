"""Waiting in tests: for a condition, never for a time that ought to suffice.

`GUARD` ends a test that would wait forever. Nothing may depend on it: a busy machine takes as long as it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

GUARD = 120.0
"""Seconds."""


def until(condition: Callable[[], T], failure: str | Callable[[], str] = "it did not happen") -> T:
    """Return the condition's value once it is true. Fails with `failure` after `GUARD` seconds."""
    began = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - began
        if waited > GUARD:
            raise AssertionError(failure if isinstance(failure, str) else failure())
        time.sleep(min(0.001 + waited / 20, 0.02))
    return value
