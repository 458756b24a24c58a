"""A stream of server-sent events that says what there is, then what of it has changed, until client or server ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llamado.http.disconnect import disconnected

TICK = 0.25
"""Seconds between two looks for changes."""
_PING_SECONDS = 15.0
_LAST_SECONDS = 1.0  # for the end of a stream whose client does not read


class LiveStream(Response):
    """Looks for as long as its client stays, nothing is looked at for nobody, and until the process is `ending`.

    `read` gives all there is the first time, then what has changed; empty: nothing. `tick`: seconds between two looks.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], ending: Callable[[], bool], *, tick: float = TICK) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._read, self._ending, self._tick = read, ending, tick

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
