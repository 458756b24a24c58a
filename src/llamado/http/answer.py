"""JSON responses, error responses, and the last-resort error handler of applications."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import Response

from llamado.errors import LlamadoError
from llamado.http.errors import ApiError, ClientDisconnected, error_body, shutting_down, unexpected

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""

JSON_TYPE = "application/json; charset=utf-8"


def json_response(body: bytes, status: int = 200, headers: dict[str, Any] | None = None) -> Response:
    """Return a response with an encoded JSON body."""
    return Response(body, status, headers, media_type=JSON_TYPE)


def error_response(error: ApiError, path: str = "", *, close: bool = False) -> Response:
    """Return an error response in the format of the API that `path` belongs to, with Retry-After for transient errors.

    `close`: close the connection after the response.
    """
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if close:
        headers["Connection"] = "close"
    return json_response(error_body(error, path), error.status, headers)


async def answer(send: Send, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Send a complete response; JSON unless `headers` are given."""
    given = [(b"content-type", JSON_TYPE.encode())] if headers is None else headers
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*given, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class _TrackedSend:
    """A `send` that notes when the response starts."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False

    def __call__(self, message: MutableMapping[str, Any]) -> Awaitable[None]:
        self.is_started = True
        return self._send(message)


async def end_if_cancelled(app: App, scope: Scope, receive: Receive, send: Send, is_ending: Callable[[], bool]) -> None:
    """Run an application; send 503 if its task is cancelled before its response when the process `is_ending`.

    Streams of answers end with an error event by themselves.
    """
    tracked = _TrackedSend(send)
    try:
        await app(scope, receive, tracked)
    except asyncio.CancelledError:
        if not is_ending():
            raise
        if not tracked.is_started:
            await error_response(shutting_down(), scope["path"], close=True)(scope, receive, send)


async def handle_errors(
    app: App,
    scope: Scope,
    receive: Receive,
    send: Send,
    log: logging.Logger,
    *,
    translate: Callable[[Exception], ApiError] = unexpected,
    is_ending: Callable[[], bool] = lambda: False,
) -> None:
    """Run an application and send an error response for an exception, unless the response has started.

    Exceptions other than LlamadoError are logged with their traceback. `is_ending`: see `end_if_cancelled`.
    """
    tracked = _TrackedSend(send)
    try:
        await end_if_cancelled(app, scope, receive, tracked, is_ending)
        return
    except ClientDisconnected:
        return
    except Exception as error:
        if not isinstance(error, LlamadoError):
            log.error("%s %s", scope["method"], scope["path"][:200], exc_info=error)
        fault = translate(error)
    if not tracked.is_started:
        await error_response(fault, scope["path"])(scope, receive, send)
