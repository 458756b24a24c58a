"""Whole answers: JSON, and errors as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import Response

from llamado.http.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""

JSON_TYPE = "application/json; charset=utf-8"


def json_response(body: bytes, status: int = 200, headers: dict[str, Any] | None = None) -> Response:
    """A response with a JSON body that is already written."""
    return Response(body, status, headers, media_type=JSON_TYPE)


def error_response(error: ApiError, *, close: bool = False) -> Response:
    """An error as a response; one that may pass says when to ask again. `close`: the connection ends with it."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if close:
        headers["Connection"] = "close"
    return json_response(error.body, error.status, headers)


async def answer(send: Send, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Send a whole answer; JSON unless the headers say otherwise."""
    given = [(b"content-type", JSON_TYPE.encode())] if headers is None else headers
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*given, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
