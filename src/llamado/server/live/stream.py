"""Streams of server-sent events that last until the client disconnects or the server shuts down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llamado.http.streams import disconnected

PING_SECONDS = 15.0
"""A stream without messages sends a comment this often, so that proxies keep the connection."""
_POLL_SECONDS = 0.25
_LAST_SECONDS = 1.0  # for the end of a stream whose client does not read


async def polled(read: Callable[[], dict[str, Any]], ending: Callable[[], bool]) -> AsyncGenerator[bytes]:
    """Yield what `read` returns as JSON, four times a second until the server is `ending`; b"" if it is empty."""
    while not ending():
        found = read()
        yield orjson.dumps(found) if found else b""
        await asyncio.sleep(_POLL_SECONDS)


class LiveStream(Response):
    """Response that sends `messages` (JSON; b"": none yet) while its client is connected.

    When the server is `ending`, the messages end by themselves; the stream is cut off a second later.
    """

    def __init__(self, messages: AsyncGenerator[bytes], ending: Callable[[], bool]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._messages, self._ending = messages, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        try:
            with disconnected(receive) as gone:
                while not (writer.done() or gone.done() or self._ending()):
                    await asyncio.wait([writer, gone], timeout=_LAST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not gone.done():
                    await asyncio.wait([writer, gone], timeout=_LAST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            writer.cancel()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = time.monotonic()
        async with aclosing(self._messages) as messages:
            async for message in messages:
                if message or time.monotonic() >= last + PING_SECONDS:
                    body = b"data: " + message + b"\n\n" if message else b":\n\n"
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    last = time.monotonic()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
