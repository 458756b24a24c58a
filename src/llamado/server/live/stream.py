"""A stream of server-sent events with a state and its changes, until the client disconnects or the server ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

TICK = 0.25
"""Seconds between two checks for changes."""
_PING_SECONDS = 15.0
_LAST_SECONDS = 1.0  # to send the end of a stream to a client that does not read


class LiveStream(Response):
    """A response that polls a state and streams its changes.

    `read` returns the whole state at the first call and then the changed fields, {} if there are none. `ending` returns
    True when the server shuts down, which ends the stream. `tick`: seconds between two calls of `read`.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], ending: Callable[[], bool], *, tick: float = TICK) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._read, self._ending, self._tick = read, ending, tick

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(_gone(receive))
        try:
            while not (writer.done() or watcher.done() or self._ending()):
                await asyncio.wait([writer, watcher], timeout=_LAST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not watcher.done():
                await asyncio.wait([writer, watcher], timeout=_LAST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            writer.cancel()
            watcher.cancel()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        silent = 0.0
        while not self._ending():
            found = self._read()
            silent = 0.0 if found else silent + self._tick
            if found:
                body = b"data: " + orjson.dumps(found) + b"\n\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
            elif silent >= _PING_SECONDS:
                silent = 0.0
                await send({"type": "http.response.body", "body": b":\n\n", "more_body": True})
            await asyncio.sleep(self._tick)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
