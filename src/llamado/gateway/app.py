"""The gateway application: forwards requests to replicas, reports their state, and serves the administration API."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.gateway.balance import Balancer
from llamado.gateway.forward import ForwardedRequest, Forwarder
from llamado.gateway.limits import KeyLimits
from llamado.gateway.meter import Meter
from llamado.gateway.metrics import GatewayMetrics
from llamado.gateway.options import GatewayError, GatewayOptions, replica_options
from llamado.gateway.prefixes import chain_of
from llamado.gateway.replica import Replica
from llamado.http.access import HEALTH, digest, key_is_valid
from llamado.http.answer import App, Receive, Scope, Send, error_response, handle_errors, json_response
from llamado.http.bodies import body_of
from llamado.http.errors import ApiError, invalid, not_supported
from llamado.http.exchange import MODEL, MODEL_POSTS
from llamado.http.form import is_form, parse_form
from llamado.http.json_body import parse_body
from llamado.http.monitoring.exposition import CONTENT_TYPE
from llamado.http.monitoring.metrics import Traffic
from llamado.http.resumable.proxy import StreamProxy, Upstream
from llamado.http.routing import ANY, ApiRoute, ApiRouter, Endpoint
from llamado.http.upstream import UpstreamLost

log = logging.getLogger("llamado.gateway")

_PER_REPLICA = ("/lora-adapters", "/props", "/v1/chat/completions/control")
_POSTS = MODEL_POSTS - {*_PER_REPLICA}
_GETS = ("/props", "/lora-adapters")
_HEALTHY = json_response(b'{"status":"ok"}')
_RETRY_AFTER = 2


class Gateway:
    """The gateway's ASGI application. Create it in the event loop that runs it."""

    def __init__(self, options: GatewayOptions, limits: KeyLimits) -> None:
        self._limits = limits
        self._keeping = asyncio.ensure_future(limits.keep())
        self._admin = (digest(options.admin_key.encode()),) if options.admin_key else ()
        self.balancer = Balancer(options)
        self.ending = False
        """True during shutdown: cancelled requests then get an error response."""
        self.traffic = Traffic()
        retries: Counter[str] = Counter()
        forward_keys = not (options.keys or options.access.api_keys)
        self.streams: StreamProxy[Replica] = StreamProxy(
            lambda replica: Upstream(replica.pool, replica.key), forward_key=forward_keys
        )
        self._forwarder = Forwarder(self.balancer, retries, options.patience, forward_keys)
        self._metrics = GatewayMetrics(self.balancer, limits, retries, self.traffic, options.labels)
        self.routes = ApiRouter(self._routes())

    def _routes(self) -> list[ApiRoute]:
        routes = [
            *(("POST", path, self._forward) for path in sorted(_POSTS)),
            *(("GET", path, self._forward) for path in _GETS),
            *((ANY, path, self._refuse) for path in _PER_REPLICA),
            ("GET", "/livez", self._live),
            *(("GET", path, self._ready) for path in sorted(HEALTH - {"/livez"})),
            ("GET", "/models", self._list_models),
            ("GET", "/v1/models", self._list_models),
            ("GET", MODEL + "{name:path}", self._describe_model),
            ("GET", "/metrics", self._scrape),
            ("GET", "/slots", self._slots),
            (ANY, "/slots/{id:path}", self._refuse),
            ("GET", "/gateway/status", self._status),
            ("GET", "/gateway/replicas", self._for_administrators(self._list)),
            ("POST", "/gateway/replicas", self._for_administrators(self._add)),
            ("DELETE", "/gateway/replicas", self._for_administrators(self._remove)),
            ("POST", "/gateway/drain", self._for_administrators(self._drain)),
        ]
        return [*(ApiRoute(*route) for route in routes), *self.streams.routes()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await handle_errors(self.routes.app, scope, receive, send, log, is_ending=lambda: self.ending)

    async def close(self) -> None:
        """Close all replicas and save the quotas."""
        self._keeping.cancel()
        await self.streams.wait_closed()
        await self.balancer.close()
        try:
            await asyncio.to_thread(self._limits.save)
        except OSError as error:
            log.error("quotas: not saved: %s", error)

    # Forwarded requests

    async def _forward(self, request: Request) -> App:
        scope = request.scope
        body = await body_of(scope).read(scope, request.receive)
        fields: Any = None
        if body[:1] == b"{":
            try:
                fields = await parse_body(body)
            except ApiError:
                pass  # the replica reports what is wrong with it
        elif is_form(kind := request.headers.get("content-type", "")):
            try:
                fields = (await parse_form(body, kind)).fields
            except ApiError:
                pass
        self.streams.claim(scope, fields)
        model = fields.get("model") if isinstance(fields, dict) else None
        usage = self._limits.find(dict(scope["headers"])) if scope["method"] == "POST" else None
        meter = None if usage is None else Meter(usage, body)
        return ForwardedRequest(
            self._forwarder, body, chain_of(fields), model if isinstance(model, str) else None, meter
        )

    async def _refuse(self, request: Request) -> App:
        raise not_supported(f"{request.scope['path']} is about one replica: ask that replica itself")

    # State of all replicas

    async def _live(self, request: Request) -> App:
        return _HEALTHY

    async def _ready(self, request: Request) -> App:
        if self.balancer.ready:
            return _HEALTHY
        states = {r.name: "draining" if r.draining else r.state.message for r in self.balancer.replicas.values()}
        return error_response(
            ApiError("unavailable_error", "no replica is ready", retry_after=_RETRY_AFTER, replicas=states)
        )

    async def _list_models(self, request: Request) -> App:
        """List each model once, with the replicas that serve it."""
        return _json({"object": "list", "data": self._merged_models()})

    async def _describe_model(self, request: Request) -> App:
        name = request.path_params["name"]
        models = self._merged_models()
        found = next((one for one in models if name in (one["id"], *(one.get("aliases") or ()))), None)
        if found is None:
            raise ApiError("not_found_error", f"model '{name[:1000]}' not found")
        return _json({**found, "id": name})

    def _merged_models(self) -> list[dict[str, Any]]:
        merged: dict[str, dict[str, Any]] = {}
        for replica in self.balancer.replicas.values():
            if replica.ready and not replica.draining:
                for model in replica.models:
                    entry = merged.setdefault(model["id"], {**model, "replicas": []})
                    entry["replicas"].append(replica.name)
        return list(merged.values())

    async def _scrape(self, request: Request) -> App:
        text = await self._metrics.text()
        return Response(text.encode(), headers={"content-type": CONTENT_TYPE.decode()})

    async def _slots(self, request: Request) -> App:
        """List the slots of all ready replicas, each with the replica's name."""

        async def slots_of(replica: Replica) -> list[dict[str, Any]]:
            try:
                return [{"replica": replica.name, **slot} for slot in await replica.slots()]
            except (UpstreamLost, TimeoutError, ValueError):
                return []

        ready = [replica for replica in self.balancer.replicas.values() if replica.ready]
        found = await asyncio.gather(*map(slots_of, ready))
        return _json([slot for slots in found for slot in slots])

    async def _status(self, request: Request) -> App:
        """Report state and load of each replica. Addresses are left out: they are for administrators only."""
        return _json({"replicas": [r.status for r in self.balancer.replicas.values()]})

    # Administration

    def _for_administrators(self, endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> App:
            if not self._admin:
                message = "administration is disabled: start the gateway with --admin-key KEY"
                raise ApiError("permission_error", message)
            if not key_is_valid(dict(request.scope["headers"]), self._admin):
                raise ApiError("authentication_error", "this needs the gateway's --admin-key")
            return await endpoint(request)

        return checked

    async def _find_replica(self, request: Request) -> tuple[Replica, dict[str, Any]]:
        """Return the replica that a request names, and the request's fields. Raises ApiError."""
        fields = await _read_fields(request)
        name = fields.get("replica")
        replica = self.balancer.find(name) if isinstance(name, str) else None
        if replica is None:
            known = ", ".join(self.balancer.replicas) or "none"
            raise ApiError("not_found_error", f"replica: expected the name or URL of one ({known}), got {name!r}")
        return replica, fields

    async def _list(self, request: Request) -> App:
        return _json({"replicas": [r.admin_status for r in self.balancer.replicas.values()]})

    async def _add(self, request: Request) -> App:
        try:
            options = replica_options(await _read_fields(request), "replica")
        except GatewayError as error:
            raise invalid(str(error)) from None
        replica = self.balancer.add(options)
        log.info("replica %s: added", replica.name)
        return _json(replica.admin_status, 201)

    async def _remove(self, request: Request) -> App:
        replica, _ = await self._find_replica(request)
        self.balancer.remove(replica)
        log.info("replica %s: removed (requests still under way=%d)", replica.name, replica.in_flight)
        return _json(replica.admin_status)

    async def _drain(self, request: Request) -> App:
        """`{"replica": NAME, "drain": true, "wait": SECONDS}`: respond when the replica is idle, or after `wait`."""
        replica, fields = await self._find_replica(request)
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
        return _json(replica.admin_status)


def _json(value: Any, status: int = 200) -> Response:
    return json_response(orjson.dumps(value), status)


async def _read_fields(request: Request) -> dict[str, Any]:
    """Return the fields of a JSON body, or of the query if there is no body. Raises ApiError."""
    body = await body_of(request.scope).read(request.scope, request.receive)
    fields = await parse_body(body) if body else {name: text for name, text in request.query_params.items() if text}
    if not isinstance(fields, dict):
        raise invalid("the request body must be a JSON object")
    return fields
