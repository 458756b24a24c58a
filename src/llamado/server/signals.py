"""How a server ends: the first signal finishes what runs, the second ends everything at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class EndingServer(uvicorn.Server):
    """uvicorn that a signal ends cleanly: with exit code 0. `handle_exit` says what a signal does."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal once more after a clean end; a clean end is exit code 0 here.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)
