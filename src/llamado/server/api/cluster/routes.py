"""`/cluster`: the machines a model is divided among; workers that join and leave."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.devices.split.placement import NotEnoughMemory
from llamado.engine.cluster.layout import BadLayout, LayoutPart
from llamado.engine.cluster.membership import UnknownWorker
from llamado.errors import LlamadoError
from llamado.http.access import digest
from llamado.http.answer import json_response
from llamado.http.json_body import read_object
from llamado.server.api.cluster.bodies import cluster_json, predicted_json
from llamado.server.api.routes import Routes
from llamado.server.errors import RETRY_AFTER, ApiError, invalid, not_supported
from llamado.server.live.stream import LiveStream
from llamado.server.loaded_model import ServedCluster
from llamado.server.state import ServerState

MEMBERS = frozenset({"/cluster/join", "/cluster/drain"})
"""Paths that need the token of `--cluster-token` instead of a key."""
TOKEN = "x-cluster-token"
_MOST_DEVICES = 256
_EVENTS_OF = {
    200: {"description": "the body of /cluster again and again", "content": {"text/event-stream": {"schema": {}}}}
}
_LOOK_SECONDS = 0.1  # between two looks at whether something changed
_FIGURES_SECONDS = 1.0  # between two events where nothing but figures did

T = TypeVar("T")


def cluster_router(state: ServerState) -> Routes:
    """Who is there, and who comes and goes."""
    router = Routes("cluster")
    moving = asyncio.Lock()

    @router.get("/cluster")
    async def cluster(_: Request) -> Response:
        return json_response(orjson.dumps(_cluster(state)))

    @router.get("/cluster/events", responses=_EVENTS_OF)
    async def cluster_events(_: Request) -> Response:
        state.loaded()
        return LiveStream(ClusterSource(state).read, state.ending, tick=_LOOK_SECONDS)

    @router.post("/cluster/predict")
    async def predict_layout(request: Request) -> Response:
        members = _divided(state)
        parts = _parts(await read_object(request))
        async with moving:  # it may have speeds measured, once
            predicted = await _done(lambda: members.predict(parts), BadLayout)
        return json_response(orjson.dumps(predicted_json(predicted)))

    @router.post("/cluster/layers")
    async def lay_out(request: Request) -> Response:
        members = _divided(state)
        parts = _parts(await read_object(request))
        if moving.locked():
            raise ApiError("unavailable_error", "layers are being moved already", retry_after=RETRY_AFTER)
        async with moving:
            await _done(lambda: members.lay_out(parts), BadLayout, NotEnoughMemory)
        return json_response(orjson.dumps(_cluster(state)))

    @router.post("/cluster/join")
    async def join(request: Request) -> Response:
        members = _members(state, request)
        body = await read_object(request)
        endpoint = _endpoint(body, request)
        share = body.get("share", 1.0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise invalid('"share" must be a number, 0 or more')
        speeds = _speeds(body.get("devices", []))
        joined = await _done(lambda: members.join(_known_as(endpoint, state), float(share), speeds))
        devices = [{"device": one.device, "holds": one.holds, "why": one.why} for one in joined]
        return json_response(orjson.dumps({"endpoint": endpoint, "devices": devices}))

    @router.post("/cluster/drain")
    async def drain(request: Request) -> Response:
        members = _members(state, request)
        endpoint = _endpoint(await read_object(request), request)
        await _done(lambda: members.drain(_known_as(endpoint, state)))
        return json_response(orjson.dumps({"endpoint": endpoint, "drained": True}))

    return router


async def _done(change: Callable[[], T], *wrong: type[LlamadoError]) -> T:
    """A change of who is there, in a thread of its own: it takes long, and no answer waits for it.

    Errors that are `wrong` say that what was asked for cannot be, and never will.
    """
    try:
        return await asyncio.to_thread(change)
    except UnknownWorker as error:
        raise ApiError("not_found_error", str(error)) from None
    except LlamadoError as error:
        if isinstance(error, wrong):
            raise invalid(str(error)) from None
        raise ApiError("unavailable_error", str(error), retry_after=RETRY_AFTER) from None


def _cluster(state: ServerState) -> dict[str, Any]:
    """`/cluster` as it is now."""
    served = state.loaded()
    return cluster_json(served.info.name, None if served.cluster is None else served.cluster.view())


class ClusterSource:
    """One listener of `/cluster/events`; see `LiveStream`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._told: object = None
        self._at = 0.0

    def read(self) -> dict[str, Any]:
        """All of it at once, whenever somebody comes or goes or layers move, and each second for the figures."""
        cluster = self._state.loaded().cluster
        mark = cluster, None if cluster is None else cluster.mark()
        now = time.monotonic()
        if self._at and mark == self._told and now < self._at + _FIGURES_SECONDS:
            return {}
        self._told, self._at = mark, now
        return _cluster(self._state)


def _divided(state: ServerState) -> ServedCluster:
    """The machines whose layers can be moved. Raises ApiError where there is one machine alone."""
    cluster = state.loaded().cluster
    if cluster is None:
        raise not_supported("The model is on this machine alone. Start the server with `--rpc` or `--cluster-token`")
    return cluster


def _parts(body: dict[str, Any]) -> list[LayoutPart]:
    """Who is to have what: `devices` as `GET /cluster` has them, of which name, layers and head count."""
    devices = body.get("devices")
    if not isinstance(devices, list) or len(devices) > _MOST_DEVICES or not all(isinstance(d, dict) for d in devices):
        raise invalid('"devices" must be a list of objects')
    found = []
    for part in devices:
        name, layers, head = part.get("device"), part.get("layers", []), part.get("head", False)
        whole = isinstance(layers, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in layers)
        if not isinstance(name, str) or not whole or not isinstance(head, bool):
            raise invalid('"devices" must hold objects as {"device": "CPU", "layers": [0, 1], "head": true}')
        found.append(LayoutPart(name, tuple(layers), head))
    return found


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


def _known_as(endpoint: str, state: ServerState) -> str:
    """What the engine calls a worker: in the latency lab the link to it."""
    return endpoint if state.lab is None else state.lab.link_to(endpoint)


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
