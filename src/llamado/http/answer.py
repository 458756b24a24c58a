"""Whole answers, sent without a framework."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from llamado.http.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""

JSON = (b"content-type", b"application/json; charset=utf-8")


async def answer(send: Send, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Send a whole answer; JSON unless the headers say otherwise."""
    given = [JSON] if headers is None else headers
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*given, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def answer_error(send: Send, error: ApiError, *, close: bool = False) -> None:
    """Send an error; one that may pass says when to ask again. `close`: the connection ends with it."""
    headers = [JSON]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if close:
        headers.append((b"connection", b"close"))
    await answer(send, error.body, error.status, headers)
