"""Log lines for requests that the router itself refuses; model processes log the others."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from typing import Any

from llamado.http.answer import App, Receive, Scope, Send
from llamado.server.app import reason_of

log = logging.getLogger("llamado.router")

_LONGEST = 300  # characters of a path or a reason


class RefusalLog:
    """ASGI middleware that logs the router's own responses with status 400 and above."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status, reason = 0, ""

        async def send_noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status, reason
            if message["type"] == "http.response.start":
                # llamado servers put a request id into their responses and log them.
                named = any(name.lower() == b"x-request-id" for name, _ in message["headers"])
                status = 0 if named else message["status"]
            elif status >= 400 and not reason:
                reason = reason_of(message.get("body", b""))[:_LONGEST]
            await send(message)

        method, path = scope["method"], scope["path"][:_LONGEST]
        await self._app(scope, receive, send_noted)
        if status >= 400:
            client = f"{scope['client'][0]} " if scope.get("client") else ""
            details = [f"{(time.perf_counter() - began) * 1e3:.1f} ms", *([reason] if reason else [])]
            log.info("%s%s %s %d, %s", client, method, path, status, ", ".join(details))
