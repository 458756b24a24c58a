"""Ends a test process that hangs in native code, where the signal of pytest-timeout is not handled."""

from __future__ import annotations

import faulthandler
import os
import sys
import time

EVERY = 30.0
"""Seconds until the limit begins anew. pytest's own `faulthandler_timeout` starts and ends a thread for each test."""


class Watchdog:
    """A pytest plugin: print where the threads stand and end the process some time after pytest-timeout should."""

    def __init__(self, timeout: float) -> None:
        self._limit = 1.1 * timeout + EVERY
        self._begun = -EVERY
        assert sys.__stderr__ is not None
        # Standard error itself goes to a file while a test runs.
        self._stderr = os.dup(sys.__stderr__.fileno())

    def pytest_runtest_logstart(self) -> None:
        if time.monotonic() >= self._begun + EVERY:
            self._begun = time.monotonic()
            faulthandler.dump_traceback_later(self._limit, exit=True, file=self._stderr)

    def pytest_unconfigure(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.close(self._stderr)
