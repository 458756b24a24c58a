"""Noticing that a client has disconnected while its request is processed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from llamado.http.answer import Receive
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
