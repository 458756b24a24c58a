"""The uvicorn server of all servers: returns freed memory, and shuts down gracefully.

The first signal finishes running requests, the second ends them at once with an error.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from llamado.http.access import Access
from llamado.http.connections import HttpConnection
from llamado.processes import memory

log = logging.getLogger("llamado.server")

_TICK = 0.05  # seconds
_ERROR_SECONDS = 1.0  # for the error that ends an unfinished request; the last of the grace period


class GracefulServer(uvicorn.Server):
    """uvicorn server that exits with code 0 after a signal. Subclasses implement `handle_exit`.

    While running requests are finished, `access` refuses new ones with 503 and Retry-After. Unfinished ones are
    cancelled at the end of the grace period, and end with an error.
    """

    access: Access | None = None
    _memory_watch: asyncio.Task[None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._memory_watch = asyncio.ensure_future(memory.watch())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.access is not None:
            self.access.drain()
            for connection in self.server_state.connections:
                if isinstance(connection, HttpConnection):
                    connection.finish()
            loop = asyncio.get_running_loop()
            end = loop.time() + (self.config.timeout_graceful_shutdown or 0)
            while self.access.n_running and not self.force_exit and loop.time() < end - _ERROR_SECONDS:
                await asyncio.sleep(_TICK)
            await self._cancel_requests(self.access.n_running)
            self.config.timeout_graceful_shutdown = max(1, int(end - loop.time()))
        await super().shutdown(sockets)

    async def _cancel_requests(self, count: int) -> None:
        """End the unfinished requests with an error, instead of a broken connection."""
        if not count:
            return
        log.warning("shutdown: %d request(s) unfinished; ending them with an error", count)
        tasks = self.server_state.tasks.copy()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_ERROR_SECONDS)

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
