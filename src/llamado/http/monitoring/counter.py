"""Request counting middleware for router and gateway."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from llamado.http.access import HEALTH
from llamado.http.answer import App, Receive, Scope, Send
from llamado.http.monitoring.metrics import Traffic

CLIENT_GONE = 499
"""Status in logs and metrics for a client that disconnected before the response started (as in nginx)."""
OTHER = "other"
"""Metrics endpoint of unknown paths."""


class RequestCounter:
    """ASGI middleware that counts requests. `endpoint`: maps (method, path without prefix) to an endpoint, or to ""."""

    def __init__(self, app: App, traffic: Traffic, endpoint: Callable[[str, str], str], prefix: str = "") -> None:
        self._app = app
        self._traffic = traffic
        self._endpoint = endpoint
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 0
        complete = False
        method, path = scope["method"], scope["path"]

        async def send_counted(message: Any) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body"):
                complete = True
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except BaseException:
            status = status or 500
            raise
        finally:
            self._count(method, path, status or CLIENT_GONE, time.perf_counter() - began, cancelled=not complete)

    def refused(self, scope: Scope, status: int) -> None:
        """Count a request that was refused before it reached this middleware."""
        self._count(scope["method"], scope["path"], status, 0.0)

    def _count(self, method: str, path: str, status: int, seconds: float, *, cancelled: bool = False) -> None:
        path = path.removeprefix(self._prefix)
        endpoint = self._endpoint("GET" if method == "HEAD" else method, path) or OTHER
        self._traffic.count(method, endpoint, status, seconds, cancelled=cancelled, probe=path in HEALTH)
