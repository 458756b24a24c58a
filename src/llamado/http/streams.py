"""Streamed responses, and the guard that notices the client's disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.responses import Response

from llamado.http.answer import Receive, Scope, Send
from llamado.http.errors import ClientDisconnected

T = TypeVar("T")


class disconnected:
    """Watches for a disconnect of the client inside a `with`, which yields a future that is done after one.

    `callback`: called at the disconnect. The request's body must have been read; what is left of it is discarded.
    """

    def __init__(self, receive: Receive, callback: Callable[[], object] = lambda: None) -> None:
        self._receive = receive
        self._callback = callback

    def __enter__(self) -> asyncio.Future[None]:
        self._watcher = asyncio.ensure_future(self._watch())
        return self._watcher

    def __exit__(self, *_: object) -> None:
        self._watcher.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._callback()


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; cancel it and raise ClientDisconnected if the client disconnects first."""
    task = asyncio.ensure_future(work)
    try:
        with disconnected(receive) as gone:
            either: list[asyncio.Future[Any]] = [task, gone]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected("the client disconnected before the response was complete")
        return task.result()
    finally:
        task.cancel()


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
