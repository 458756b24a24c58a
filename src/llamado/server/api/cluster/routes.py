"""`/cluster`: the machines a model is divided among; workers that join and leave."""

from __future__ import annotations

import asyncio
import hmac
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.devices.split.placement import MAX_SHARE, NotEnoughMemory
from llamado.engine.topology.layout import BadLayout, LayoutPart
from llamado.engine.topology.membership import UnknownWorker
from llamado.errors import LlamadoError
from llamado.http.access import digest, is_local_request
from llamado.http.answer import json_response
from llamado.http.json_body import read_object
from llamado.server.api.cluster.bodies import cluster_json, predicted_json
from llamado.server.api.routes import Routes
from llamado.server.errors import RETRY_AFTER, ApiError, invalid, not_supported
from llamado.server.live.stream import LiveStream
from llamado.server.model import ServedCluster
from llamado.server.state import ServerState

MEMBERS = frozenset({"/cluster/join", "/cluster/drain"})
"""Paths that need the token of `--cluster-token` instead of a key."""
TOKEN = "x-cluster-token"
_MOST_DEVICES = 256
_MOST_CHANGES = 8
"""Joins under way at a time, and drains."""
_MOST_CHARACTERS = 300
"""Characters of an endpoint or of a device's name; a host name has at most 253."""
_LEAST_SPEED, _MOST_SPEED = 1e3, 1e16
"""Bytes per second that a worker may give as its speed."""
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
    joins, drains = _Changes("joined"), _Changes("drained")

    @router.get("/cluster")
    async def cluster(_: Request) -> Response:
        return json_response(orjson.dumps(_cluster(state)))

    @router.get("/cluster/events", responses=_EVENTS_OF)
    async def cluster_events(_: Request) -> Response:
        state.loaded()
        return LiveStream(ClusterSource(state).read, state.ending, tick=_LOOK_SECONDS)

    @router.post("/cluster/predict")
    async def predict_layout(request: Request) -> Response:
        _may_move(state, request)
        members = _divided(state)
        parts = _parts(await read_object(request))
        async with moving:  # it may have speeds measured, once
            predicted = await _done(lambda: members.predict(parts), BadLayout)
        return json_response(orjson.dumps(predicted_json(predicted)))

    @router.post("/cluster/layers")
    async def lay_out(request: Request) -> Response:
        _may_move(state, request)
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
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= MAX_SHARE:
            raise invalid(f'"share" must be a number from 0 to {MAX_SHARE:g}')
        speeds = _speeds(body.get("devices", []))
        joined = await joins.run(endpoint, lambda: members.join(_known_as(endpoint, state), float(share), speeds))
        devices = [{"device": one.device, "holds": one.holds, "why": one.why} for one in joined]
        return json_response(orjson.dumps({"endpoint": endpoint, "devices": devices}))

    @router.post("/cluster/drain")
    async def drain(request: Request) -> Response:
        members = _members(state, request)
        endpoint = _endpoint(await read_object(request), request)
        await drains.run(endpoint, lambda: members.drain(_known_as(endpoint, state)))
        return json_response(orjson.dumps({"endpoint": endpoint, "drained": True}))

    return router


class _Changes:
    """Joins or drains under way: a bounded number, one for each worker, in threads that nothing else waits for."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._workers: set[str] = set()

    async def run(self, worker: str, change: Callable[[], T]) -> T:
        """Do a change of one worker. Raises ApiError, at once if too many are under way."""
        if worker in self._workers:
            raise ApiError("unavailable_error", f"{worker} is being {self._event} already", retry_after=RETRY_AFTER)
        if len(self._workers) >= _MOST_CHANGES:
            text = f"{_MOST_CHANGES} other workers are being {self._event}"
            raise ApiError("unavailable_error", text, retry_after=RETRY_AFTER)
        self._workers.add(worker)

        def tracked() -> T:
            try:
                return change()
            finally:  # here, because the change goes on after its client has left
                self._workers.discard(worker)

        return await _done(tracked)


async def _done(change: Callable[[], T], *wrong: type[LlamadoError]) -> T:
    """Do a change of the cluster in a thread of its own: it takes long, and no answer waits for it.

    Errors that are `wrong` mean that what was asked for cannot be done, now or later.
    """
    try:
        return await _in_thread(change)
    except UnknownWorker as error:
        raise ApiError("not_found_error", str(error)) from None
    except LlamadoError as error:
        if isinstance(error, wrong):
            raise invalid(str(error)) from None
        raise ApiError("unavailable_error", str(error), retry_after=RETRY_AFTER) from None


def _in_thread(work: Callable[[], T]) -> Awaitable[T]:
    """Run blocking work on a thread of its own, which neither uses up the event loop's threads nor holds up the end."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a client that leaves does not stop it

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="llamado-cluster", daemon=True).start()
    return asyncio.wrap_future(future)


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


def _may_move(state: ServerState, request: Request) -> None:
    """Raise ApiError if a request may not move layers: one from another machine needs the token, as workers do."""
    if is_local_request(request.scope):
        return
    token = state.switches.cluster_token
    if token is None or not _has_token(token, request):
        # Not 401: the page would ask its user for another key.
        text = f"layers are moved from the server's own machine, or with the header {TOKEN} (--cluster-token)"
        raise ApiError("permission_error", text)


def _has_token(token: str, request: Request) -> bool:
    given = request.headers.get(TOKEN, "").encode("latin-1")
    return hmac.compare_digest(digest(given), digest(token.encode()))


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
        named = isinstance(name, str) and len(name) <= _MOST_CHARACTERS
        if not named or not whole or not isinstance(head, bool):
            raise invalid('"devices" must hold objects as {"device": "CPU", "layers": [0, 1], "head": true}')
        found.append(LayoutPart(name, tuple(layers), head))
    return found


def _members(state: ServerState, request: Request) -> ServedCluster:
    """Where workers join. Raises ApiError for who may not."""
    token = state.switches.cluster_token
    if token is None:
        raise not_supported("Workers cannot join this server. Start it with `--cluster-token`")
    if not _has_token(token, request):
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
        if len(endpoint) > _MOST_CHARACTERS or not endpoint.isprintable():
            raise invalid(f'"endpoint" must be a text as host:port of at most {_MOST_CHARACTERS} characters')
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
        good = isinstance(speed, int | float) and not isinstance(speed, bool) and _LEAST_SPEED <= speed <= _MOST_SPEED
        found.append(float(speed) if good else None)
    return found
