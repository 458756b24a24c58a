"""Noticing that a client has disconnected while its request is processed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from llamado.http.answer import Receive
from llamado.http.errors import ClientDisconnected

T = TypeVar("T")


@contextmanager
def disconnected(receive: Receive, callback: Callable[[], object] | None = None) -> Iterator[asyncio.Future[None]]:
    """Watch for a disconnect of the client inside the `with`; yield a future that is done after one.

    `callback`: called at the disconnect. The request's body must have been read; what is left of it is discarded.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if callback is not None:
            callback()

    watcher = asyncio.ensure_future(watch())
    try:
        yield watcher
    finally:
        watcher.cancel()


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
