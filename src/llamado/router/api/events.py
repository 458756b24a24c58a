"""`GET /models/sse`: events of a router's models and downloads, for any number of listeners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import orjson

_BEHIND = 1024  # queued events at which a slow listener is dropped


class EventHub:
    """Sends each event to all listeners."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[bytes | None]] = set()

    def notify(self, event: str, model: str, data: Any) -> None:
        """Send an event. Status changes are sent under both event names in use."""
        # llama-server documents `model_status`, but sends `status_change` except for the first event of a load.
        names = ("status_change", "model_status") if event == "status_change" else (event,)
        for name in names:
            fields: dict[str, Any] = {"model": model, "event": name}
            if data is not None:
                fields["data"] = data
            message = b"data: " + orjson.dumps(fields) + b"\n\n"
            for queue in list(self._listeners):
                if queue.full():
                    self._listeners.discard(queue)
                    queue.get_nowait()
                    queue.put_nowait(None)
                else:
                    queue.put_nowait(message)

    def listen(self) -> asyncio.Queue[bytes | None]:
        """Return a queue that gets all events, and None if its listener is too slow. Call `leave` at the end."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_BEHIND)
        self._listeners.add(queue)
        return queue

    def leave(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Stop sending events to a queue."""
        self._listeners.discard(queue)


async def stream_events(queue: asyncio.Queue[bytes | None], ping_interval: float) -> AsyncGenerator[bytes, None]:
    """Yield the events of a queue, and a comment after `ping_interval` silent seconds (0: never)."""
    while True:
        try:
            async with asyncio.timeout(ping_interval if ping_interval > 0 else None):
                part = await queue.get()
        except TimeoutError:
            part = b":\n\n"
        if part is None:
            return
        yield part
