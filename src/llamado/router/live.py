"""`GET /live/events` of a router: its models and its log; with `?model=NAME`, the events of that model's own server.

Listeners hold no lease: they neither load a model nor keep it loaded.
"""

from __future__ import annotations

import time
from typing import Any

from llamado.http.answer import Receive, Scope, Send
from llamado.http.errors import invalid
from llamado.http.exchange import Exchange
from llamado.http.upstream import UpstreamLost
from llamado.router.fleet import LOADED, Fleet, Instance
from llamado.server.errors import ApiError
from llamado.server.live.log_tail import LogTail

PATH = "/live/events"


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
