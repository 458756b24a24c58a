"""The gateway application: forwards requests to replicas, reports their state, and serves the administration API."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl

import orjson

from llamado.gateway.balance import Balancer
from llamado.gateway.forward import Forwarder
from llamado.gateway.limits import KeyLimits
from llamado.gateway.meter import Meter
from llamado.gateway.metrics import GatewayMetrics
from llamado.gateway.options import GatewayError, GatewayOptions, replica_options
from llamado.gateway.prefixes import chain_of
from llamado.gateway.replica import Replica
from llamado.http.access import HEALTH, digest, key_is_valid
from llamado.http.answer import Receive, Scope, Send, answer, answer_faults, error_response
from llamado.http.bodies import body_of
from llamado.http.errors import ApiError, invalid, not_found, not_supported
from llamado.http.exchange import MODEL, MODEL_POSTS, Exchange
from llamado.http.exposition import CONTENT_TYPE
from llamado.http.json_body import parse_body
from llamado.http.metrics import Traffic
from llamado.http.monitoring.counter import OTHER
from llamado.http.upstream import UpstreamLost

log = logging.getLogger("llamado.gateway")

_PER_REPLICA = frozenset({"/lora-adapters", "/props", "/v1/chat/completions/control"})
_POSTS = MODEL_POSTS - _PER_REPLICA
_GETS = frozenset({"/props", "/lora-adapters"})
_HEALTHY = b'{"status":"ok"}'
_RETRY_AFTER = 2

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gateway:
    """The gateway's ASGI application. Create it in the event loop that runs it."""

    def __init__(self, options: GatewayOptions, limits: KeyLimits) -> None:
        self._options = options
        self._retries: Counter[str] = Counter()
        self._limits = limits
        self._keeping = asyncio.ensure_future(limits.keep())
        self._admin = (digest(options.admin_key.encode()),) if options.admin_key else ()
        self._guarded = bool(options.keys or options.access.api_keys)
        self.balancer = Balancer(options)
        self.ending = False
        """True during shutdown: cancelled requests then get an error response."""
        self.traffic = Traffic()
        self._metrics = GatewayMetrics(self.balancer, self._limits, self._retries, self.traffic, options.labels)
        self._handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/livez"): self._live,
            **{("GET", path): self._ready for path in HEALTH - {"/livez"}},
            ("GET", "/models"): self._models,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._scrape,
            ("GET", "/slots"): self._slots,
            ("GET", "/gateway/status"): self._status,
        }
        self._admin_handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/gateway/replicas"): self._list,
            ("POST", "/gateway/replicas"): self._add,
            ("DELETE", "/gateway/replicas"): self._remove,
            ("POST", "/gateway/drain"): self._drain,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_faults(self._dispatch, scope, receive, send, log, ending=lambda: self.ending)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if (method == "POST" and path in _POSTS) or (method == "GET" and path in _GETS):
            await self._forward(scope, receive, send)
        elif handler := self._handlers.get((method, path)):
            await handler(scope, receive, send)
        elif method == "GET" and path.startswith(MODEL):
            await self._model(scope, receive, send)
        elif handler := self._admin_handlers.get((method, path)):
            self._check_administrator(dict(scope["headers"]))
            await handler(scope, receive, send)
        elif path in _PER_REPLICA or path.startswith("/slots/"):
            raise not_supported(f"{path} is about one replica: ask that replica itself")
        else:
            raise not_found()

    def endpoint(self, method: str, path: str) -> str:
        """Return a request's endpoint in the metrics: its path, or a pattern for paths with names in them."""
        one = (method, path)
        if (
            path in _PER_REPLICA | (_POSTS if method == "POST" else _GETS)
            or one in self._handlers | self._admin_handlers
        ):
            return path
        if method == "GET" and path.startswith(MODEL):
            return f"{MODEL}{{name}}"
        return "/slots/{id}" if path.startswith("/slots/") else OTHER

    async def close(self) -> None:
        """Close all replicas and save the quotas."""
        self._keeping.cancel()
        await self.balancer.close()
        try:
            await asyncio.to_thread(self._limits.save)
        except OSError as error:
            log.error("quotas: not saved: %s", error)

    # Forwarded requests

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(scope).read(scope, receive)
        fields: Any = None
        if body[:1] == b"{":
            try:
                fields = await parse_body(body)
            except ApiError:
                pass  # the replica reports what is wrong with it
        chain = chain_of(fields)
        model = fields.get("model") if isinstance(fields, dict) else None
        del fields
        use = self._limits.find(dict(scope["headers"])) if scope["method"] == "POST" else None
        meter = None if use is None else Meter(use, body)
        exchange = Exchange(scope, receive, send, body, keys=not self._guarded)
        del body  # the exchange releases it when the response starts
        forwarder = Forwarder(self.balancer, scope, exchange, self._retries, patience=self._options.patience)
        try:
            async with exchange:
                await forwarder.run(chain, model if isinstance(model, str) else None, meter)
        finally:
            if meter is not None:
                await meter.settle(charged=exchange.started or (exchange.disconnected and exchange.sent))

    # State of all replicas

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, _HEALTHY)

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.balancer.ready:
            await answer(send, _HEALTHY)
            return
        states = {r.name: "draining" if r.draining else r.state.message for r in self.balancer.replicas.values()}
        error = ApiError("unavailable_error", "no replica is ready", retry_after=_RETRY_AFTER, replicas=states)
        await error_response(error)(scope, receive, send)

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """List each model once, with the replicas that serve it."""
        await answer(send, orjson.dumps({"object": "list", "data": self._merged_models()}))

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve `/v1/models/NAME`: one model."""
        name = scope["path"].removeprefix(MODEL)
        found = next((one for one in self._merged_models() if name in (one["id"], *(one.get("aliases") or ()))), None)
        if found is None:
            raise ApiError("not_found_error", f"model '{name[:1000]}' not found")
        await answer(send, orjson.dumps({**found, "id": name}))

    def _merged_models(self) -> list[dict[str, Any]]:
        merged: dict[str, dict[str, Any]] = {}
        for replica in self.balancer.replicas.values():
            if replica.ready and not replica.draining:
                for model in replica.models:
                    entry = merged.setdefault(model["id"], {**model, "replicas": []})
                    entry["replicas"].append(replica.name)
        return list(merged.values())

    async def _scrape(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, (await self._metrics.text()).encode(), 200, [(b"content-type", CONTENT_TYPE)])

    async def _slots(self, scope: Scope, receive: Receive, send: Send) -> None:
        """List the slots of all ready replicas, each with the replica's name."""

        async def of(replica: Replica) -> list[dict[str, Any]]:
            try:
                return [{"replica": replica.name, **slot} for slot in await replica.slots()]
            except (UpstreamLost, TimeoutError, ValueError):
                return []

        ready = [replica for replica in self.balancer.replicas.values() if replica.ready]
        found = await asyncio.gather(*map(of, ready))
        await answer(send, orjson.dumps([slot for slots in found for slot in slots]))

    async def _status(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Report state and load of each replica. Addresses are left out: they are for administrators only."""
        await answer(send, orjson.dumps({"replicas": [r.status for r in self.balancer.replicas.values()]}))

    # Administration

    def _check_administrator(self, headers: dict[bytes, bytes]) -> None:
        if not self._admin:
            raise ApiError("permission_error", "administration is disabled: start the gateway with --admin-key KEY")
        if not key_is_valid(headers, self._admin):
            raise ApiError("authentication_error", "this needs the gateway's --admin-key")

    async def _read_fields(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        body = await body_of(scope).read(scope, receive)
        fields = await parse_body(body) if body else dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if not isinstance(fields, dict):
            raise invalid("the request body must be a JSON object")
        return fields

    async def _find_replica(self, scope: Scope, receive: Receive) -> tuple[Replica, dict[str, Any]]:
        fields = await self._read_fields(scope, receive)
        name = fields.get("replica")
        replica = self.balancer.find(name) if isinstance(name, str) else None
        if replica is None:
            known = ", ".join(self.balancer.replicas) or "none"
            raise ApiError("not_found_error", f"replica: expected the name or URL of one ({known}), got {name!r}")
        return replica, fields

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, orjson.dumps({"replicas": [r.admin_status for r in self.balancer.replicas.values()]}))

    async def _add(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            options = replica_options(await self._read_fields(scope, receive), "replica")
        except GatewayError as error:
            raise invalid(str(error)) from None
        replica = self.balancer.add(options)
        log.info("replica %s: added", replica.name)
        await answer(send, orjson.dumps(replica.admin_status), 201)

    async def _remove(self, scope: Scope, receive: Receive, send: Send) -> None:
        replica, _ = await self._find_replica(scope, receive)
        self.balancer.remove(replica)
        log.info("replica %s: removed (requests still under way=%d)", replica.name, replica.in_flight)
        await answer(send, orjson.dumps(replica.admin_status))

    async def _drain(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`{"replica": NAME, "drain": true, "wait": SECONDS}`: respond when the replica is idle, or after `wait`."""
        replica, fields = await self._find_replica(scope, receive)
        drain, wait = fields.get("drain", True), fields.get("wait", 0)
        if not isinstance(drain, bool):
            raise invalid("drain: expected true or false")
        if not isinstance(wait, (int, float)) or isinstance(wait, bool) or not 0 <= wait <= 86400:
            raise invalid("wait: expected seconds, at most 86400")
        replica.draining = drain
        log.info("replica %s: %s", replica.name, "draining" if drain else "back in service")
        if not drain:
            self.balancer.wake()
        elif wait:
            try:
                async with asyncio.timeout(wait):
                    await replica.wait_idle()
            except TimeoutError:
                pass
        await answer(send, orjson.dumps(replica.admin_status))
