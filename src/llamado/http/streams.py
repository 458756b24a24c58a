"""Streamed responses that end when their client disconnects or the application shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.responses import Response

from llamado.http.answer import Receive, Scope, Send
from llamado.http.disconnect import disconnected


class OpenStreams:
    """The streams of an application, for ending them at shutdown."""

    def __init__(self) -> None:
        self.writers: set[asyncio.Future[None]] = set()
        self.closed = False

    def close(self) -> None:
        """End all streams."""
        self.closed = True
        for writer in self.writers:
            writer.cancel()


class PartStream(Response):
    """A response that sends parts as they come, until there are no more.

    `streams`: when they are closed, the response ends as if there were no more parts. `on_close`: called at the end,
    after the generator was closed.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        *,
        streams: OpenStreams | None = None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(status_code=status, headers=headers)
        del self.headers["content-length"]
        self._parts = parts
        self._streams = OpenStreams() if streams is None else streams
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer: asyncio.Future[None] | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            writer = asyncio.ensure_future(self._write(send))
            self._streams.writers.add(writer)
            with disconnected(receive) as gone:
                if not self._streams.closed:
                    await asyncio.wait([writer, gone], return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
            if writer.done() and not writer.cancelled():
                writer.result()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if writer is not None:
                self._streams.writers.discard(writer)
                writer.cancel()
                await asyncio.wait([writer])
            await self._parts.aclose()
            self._on_close()

    async def _write(self, send: Send) -> None:
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
