"""`GET /live/events` of a router: its models and its log; with `?model=NAME`, what that model's own server tells.

A listener neither loads a model nor keeps it loaded: it has no lease.
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
    """One listener of a router; see `LiveStream`."""

    def __init__(self, fleet: Fleet, log: LogTail) -> None:
        self._fleet = fleet
        self._log = log
        self._told: list[dict[str, Any]] | None = None
        self._n_lines = 0

    def read(self) -> dict[str, Any]:
        """What the client does not know yet: `models` as they are now, and `log` goes on."""
        models = [_model_json(one) for one in self._fleet.instances.values() if not one.model.hidden]
        found: dict[str, Any] = {}
        if self._told is None:
            found["first"] = True
        if models != self._told:
            found["models"] = self._told = models
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


async def pass_on(instance: Instance, scope: Scope, receive: Receive, send: Send, *, keys: bool) -> None:
    """What the model's process tells. Raises ApiError: it does not run, or does not answer."""
    child = instance.child
    if instance.status != LOADED or child is None or instance.stopping:
        raise invalid("model is not loaded")
    async with Exchange(scope, receive, send, b"", keys=keys) as exchange:
        try:
            connection = await exchange.forward(child.pool, PATH.encode(), b"", ended=child.exit.done)
            await exchange.deliver(connection)
        except UpstreamLost as error:
            if exchange.started:
                # The model was unloaded: the stream ends as it does when a server ends.
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif not exchange.disconnected:
                raise ApiError("server_error", f"model '{instance.model.name}': {error}", status=502) from None
