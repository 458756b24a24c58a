"""Event streams of a router: `/live/events` (its models and its log, or one model's events) and `/models/sse`.

Listeners hold no lease: they neither load a model nor keep it loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from llamado.http.answer import Receive, Scope, Send
from llamado.http.errors import invalid
from llamado.http.exchange import Exchange
from llamado.http.upstream import UpstreamLost
from llamado.router.fleet import LOADED, Fleet, Instance
from llamado.server.errors import ApiError
from llamado.server.live.log_tail import LogTail

PATH = "/live/events"
_BEHIND = 1024  # queued events at which a slow listener is dropped


class RouterSource:
    """Event source for one listener; see `LiveStream`."""

    def __init__(self, fleet: Fleet, log: LogTail) -> None:
        self._fleet = fleet
        self._log = log
        self._sent_models: list[dict[str, Any]] | None = None
        self._n_lines = 0

    def read(self) -> dict[str, Any]:
        """Return the changes since the last call: `models` if they changed, and new lines of `log`."""
        models = [_model_json(one) for one in self._fleet.instances.values() if not one.model.hidden]
        found: dict[str, Any] = {}
        if self._sent_models is None:
            found["first"] = True
        if models != self._sent_models:
            found["models"] = self._sent_models = models
        self._n_lines, lines = self._log.since(self._n_lines)
        if lines:
            found["log"] = [line.as_json() for line in lines]
        if found:
            found["at"] = round(time.time(), 3)
        return found


def _model_json(instance: Instance) -> dict[str, Any]:
    child = instance.child
    found: dict[str, Any] = {
        "id": instance.model.name,
        "name": instance.model.title,
        "state": "stopping" if instance.stopping else instance.shown_status,
        "requests": instance.in_flight,
        "waiting": len(instance.waiters),
        "restarts": instance.restarts,
        "pid": None if child is None or child.pid <= 0 else child.pid,
    }
    if instance.progress is not None:
        found["progress"] = instance.progress.get("value")
    if instance.failed or instance.exit_code:
        found["failure"] = instance.reason or f"its process ended with code {instance.exit_code}"
    return found


class ModelEvents:
    """A response that forwards the events of a model's own server. Raises ApiError if it does not run or respond."""

    def __init__(self, instance: Instance, *, forward_key: bool) -> None:
        self._instance = instance
        self._forward_key = forward_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        instance, child = self._instance, self._instance.child
        if instance.status != LOADED or child is None or instance.stopping:
            raise invalid("model is not loaded")
        async with Exchange(scope, receive, send, b"", forward_key=self._forward_key) as exchange:
            try:
                connection = await exchange.forward(child.pool, PATH.encode(), b"", ended=child.exit.done)
                await exchange.deliver(connection)
            except UpstreamLost as error:
                if exchange.started:
                    # The model was unloaded: end the stream as a server does at shutdown.
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                elif not exchange.disconnected:
                    raise ApiError("server_error", f"model '{instance.model.name}': {error}", status=502) from None


class EventHub:
    """Sends each event of models and downloads to all listeners of `/models/sse`."""

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
