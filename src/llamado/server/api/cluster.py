"""`/cluster`: the machines a model is divided among; workers that join and leave."""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.engine.cluster.membership import UnknownWorker
from llamado.engine.cluster.view import ClusterView, DeviceView
from llamado.errors import LlamadoError
from llamado.http.access import digest
from llamado.http.answer import json_response
from llamado.http.json_body import read_object
from llamado.server.api.routes import Routes
from llamado.server.errors import RETRY_AFTER, ApiError, invalid, not_supported
from llamado.server.loaded_model import ServedCluster
from llamado.server.state import ServerState

MEMBERS = frozenset({"/cluster/join", "/cluster/drain"})
"""Paths that need the token of `--cluster-token` instead of a key."""
TOKEN = "x-cluster-token"
_MOST_DEVICES = 256

T = TypeVar("T")


def cluster_router(state: ServerState) -> Routes:
    """Who is there, and who comes and goes."""
    router = Routes("cluster")

    @router.get("/cluster")
    async def cluster(_: Request) -> Response:
        served = state.loaded()
        devices = None if served.cluster is None else served.cluster.view()
        return json_response(orjson.dumps(cluster_json(served.info.name, devices)))

    @router.post("/cluster/join")
    async def join(request: Request) -> Response:
        members = _members(state, request)
        body = await read_object(request)
        endpoint = _endpoint(body, request)
        share = body.get("share", 1.0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise invalid('"share" must be a number, 0 or more')
        speeds = _speeds(body.get("devices", []))
        joined = await _done(lambda: members.join(endpoint, float(share), speeds))
        devices = [{"device": one.device, "holds": one.holds, "why": one.why} for one in joined]
        return json_response(orjson.dumps({"endpoint": endpoint, "devices": devices}))

    @router.post("/cluster/drain")
    async def drain(request: Request) -> Response:
        members = _members(state, request)
        endpoint = _endpoint(await read_object(request), request)
        await _done(lambda: members.drain(endpoint))
        return json_response(orjson.dumps({"endpoint": endpoint, "drained": True}))

    return router


async def _done(change: Callable[[], T]) -> T:
    """A change of who is there, in a thread of its own: it takes long, and no answer waits for it."""
    try:
        return await asyncio.to_thread(change)
    except UnknownWorker as error:
        raise ApiError("not_found_error", str(error)) from None
    except LlamadoError as error:
        raise ApiError("unavailable_error", str(error), retry_after=RETRY_AFTER) from None


def _members(state: ServerState, request: Request) -> ServedCluster:
    """Where workers join. Raises ApiError for who may not."""
    token = state.switches.cluster_token
    if token is None:
        raise not_supported("Workers cannot join this server. Start it with `--cluster-token`")
    given = request.headers.get(TOKEN, "").encode("latin-1")
    if not hmac.compare_digest(digest(given), digest(token.encode())):
        raise ApiError("authentication_error", f"the header {TOKEN} does not hold the token of --cluster-token")
    if state.sleep is not None and state.sleep.asleep:
        raise ApiError("unavailable_error", "the model is asleep; a request wakes it", retry_after=RETRY_AFTER)
    cluster = state.loaded().cluster
    if cluster is None:
        raise not_supported("This model is not divided among machines: it makes vectors of texts")
    return cluster


def _endpoint(body: dict[str, Any], request: Request) -> str:
    """Where the worker is: `endpoint`, or its `port` (and `tls`) at the address that asks."""
    endpoint, port, tls = body.get("endpoint"), body.get("port"), body.get("tls", False)
    if isinstance(endpoint, str) and endpoint:
        return endpoint
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536 or not isinstance(tls, bool):
        raise invalid('"endpoint" must be a text as host:port, or "port" a number from 1 to 65535')
    if request.client is None:
        raise invalid('"endpoint" must say where the worker is: the address that asks is not known')
    host = f"[{request.client.host}]" if ":" in request.client.host else request.client.host
    return f"{'tls://' if tls else ''}{host}:{port}"


def _speeds(devices: object) -> list[float | None]:
    """Bytes per second that each device tells."""
    if not isinstance(devices, list) or len(devices) > _MOST_DEVICES or not all(isinstance(d, dict) for d in devices):
        raise invalid('"devices" must be a list of objects')
    found: list[float | None] = []
    for device in devices:
        speed = device.get("decode")
        good = isinstance(speed, int | float) and not isinstance(speed, bool) and 0 < speed < math.inf
        found.append(float(speed) if good else None)
    return found


def cluster_json(model: str, view: ClusterView | None) -> dict[str, Any]:
    """`/cluster`. Bytes, seconds, bytes per second; null: not known."""
    if view is None:
        return {"model": model, "devices": [], "tokens_per_second": None, "token_seconds": None, "events": []}
    return {
        "model": model,
        "devices": [_device_json(device) for device in view.devices],
        "tokens_per_second": round(view.tokens_per_second, 3),
        "token_seconds": {
            "total": round(view.seconds, 6),
            "compute": round(view.computing, 6),
            "link": round(view.link, 6),
            "waiting": round(view.waiting, 6),
        },
        "events": [
            {"at": round(event.at, 3), "kind": event.kind, "device": event.device, "what": event.what}
            for event in view.events
        ],
    }


def _device_json(device: DeviceView) -> dict[str, Any]:
    return {
        "device": device.name,
        "endpoint": device.endpoint or None,
        "state": device.state,
        "why": device.why or None,
        "layers": list(device.layers),
        "head": device.head,
        "holds": device.holds or None,
        "memory": {
            "weights": device.weights,
            "own_disk": device.own_weights,
            "kv": device.kv,
            "compute": device.compute,
            "free": device.memory_free,
            "total": device.memory_total,
        },
        "speed": {"decode": device.decode, "prefill": device.prefill},
        "passes_to": list(device.passes_to),
        "link": {"round_trip": device.round_trip, "bandwidth": device.bandwidth, "pulse": device.pulse},
        "token_seconds": {
            "compute": round(device.computing, 6),
            "link": round(device.link, 6),
            "waiting": round(device.waiting, 6),
        },
    }
