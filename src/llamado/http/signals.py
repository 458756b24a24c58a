"""Graceful shutdown: the first signal finishes running requests, the second stops the process at once."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from llamado.http.access import Access
from llamado.http.connections import HttpConnection

_TICK = 0.05  # seconds


class GracefulServer(uvicorn.Server):
    """uvicorn server that exits with code 0 after a signal. Subclasses implement `handle_exit`.

    While running requests are finished, `access` refuses new ones with 503 and Retry-After.
    """

    access: Access | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.access is not None:
            self.access.draining = True
            for connection in self.server_state.connections:
                if isinstance(connection, HttpConnection):
                    connection.finish()
            loop = asyncio.get_running_loop()
            end = loop.time() + (self.config.timeout_graceful_shutdown or 0)
            while self.access.n_running and not self.force_exit and loop.time() < end:
                await asyncio.sleep(_TICK)
            self.config.timeout_graceful_shutdown = max(1, int(end - loop.time()))
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signal again after a clean shutdown; here the process exits with code 0.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)
