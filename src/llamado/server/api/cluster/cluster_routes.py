"""Endpoints of `/cluster`: the devices a model is split over, their layers, and workers that join and leave."""

from __future__ import annotations

import asyncio
import hmac
import threading
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
from llamado.server.api.cluster.bodies import cluster_body, json_values
from llamado.server.api.cluster.events import ClusterPublisher
from llamado.server.api.routes import Routes
from llamado.server.errors import RETRY_AFTER, ApiError, invalid, not_supported
from llamado.server.live.stream import LiveStream
from llamado.server.model import ServedCluster
from llamado.server.state import ServerState

MEMBER_PATHS = frozenset({"/cluster/join", "/cluster/drain"})
"""Paths that require the token of `--cluster-token` instead of an API key."""
TOKEN = "x-cluster-token"
_MAX_DEVICES = 256
_MAX_CHANGES = 8
"""Concurrent joins, and concurrent drains."""
_MAX_CHARACTERS = 300
"""Of an endpoint or a device name; a host name has at most 253 characters."""
_MIN_SPEED, _MAX_SPEED = 1e3, 1e16
"""Bytes per second that a worker may report; other values count as unknown."""
_EVENTS = {
    200: {
        "description": "the view of /cluster, then its changes as JSON Patches (RFC 6902)",
        "content": {"text/event-stream": {"schema": {}}},
    }
}

T = TypeVar("T")


def cluster_router(state: ServerState) -> Routes:
    """Return the routes of `/cluster`."""
    router = Routes("cluster")
    publisher = ClusterPublisher(state)
    moving = asyncio.Lock()
    joins, drains = _MembershipChanges("joined"), _MembershipChanges("drained")

    @router.get("/cluster")
    async def cluster(_: Request) -> Response:
        return _cluster(state)

    @router.get("/cluster/events", responses=_EVENTS)
    async def cluster_events(_: Request) -> Response:
        state.loaded()
        return LiveStream(publisher.listen(), state.ending)

    @router.post("/cluster/predict")
    async def predict_layout(request: Request) -> Response:
        _check_may_move(state, request)
        members = _split_cluster(state)
        parts = _layout_parts(await read_object(request))
        async with moving:  # it measures unknown speeds
            predicted = await _run_change(lambda: members.predict(parts), BadLayout)
        return json_response(orjson.dumps(json_values(predicted)))

    @router.post("/cluster/layers")
    async def lay_out(request: Request) -> Response:
        _check_may_move(state, request)
        members = _split_cluster(state)
        parts = _layout_parts(await read_object(request))
        if moving.locked():
            raise ApiError("unavailable_error", "layers are already being moved", retry_after=RETRY_AFTER)
        async with moving:
            await _run_change(lambda: members.lay_out(parts), BadLayout, NotEnoughMemory)
        return _cluster(state)

    @router.post("/cluster/join")
    async def join(request: Request) -> Response:
        members = _joinable_cluster(state, request)
        body = await read_object(request)
        endpoint = _endpoint(body, request)
        share = body.get("share", 1.0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= MAX_SHARE:
            raise invalid(f'"share" must be a number from 0 to {MAX_SHARE:g}')
        speeds = _decode_speeds(body.get("devices", []))
        joined = await joins.run(endpoint, lambda: members.join(_link_to(endpoint, state), float(share), speeds))
        devices = [{"device": one.device, "holds": one.holds, "why": one.why} for one in joined]
        return json_response(orjson.dumps({"endpoint": endpoint, "devices": devices}))

    @router.post("/cluster/drain")
    async def drain(request: Request) -> Response:
        members = _joinable_cluster(state, request)
        endpoint = _endpoint(await read_object(request), request)
        await drains.run(endpoint, lambda: members.drain(_link_to(endpoint, state)))
        return json_response(orjson.dumps({"endpoint": endpoint, "drained": True}))

    return router


class _MembershipChanges:
    """Running joins or drains: a limited number, one per worker, each in its own thread."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._workers: set[str] = set()

    async def run(self, worker: str, change: Callable[[], T]) -> T:
        """Change the membership of one worker. Raises ApiError, immediately if too many changes are running."""
        if worker in self._workers:
            raise ApiError("unavailable_error", f"{worker} is already being {self._event}", retry_after=RETRY_AFTER)
        if len(self._workers) >= _MAX_CHANGES:
            text = f"{_MAX_CHANGES} other workers are being {self._event}"
            raise ApiError("unavailable_error", text, retry_after=RETRY_AFTER)
        self._workers.add(worker)

        def tracked() -> T:
            try:
                return change()
            finally:  # in the thread, because the change continues after its client has disconnected
                self._workers.discard(worker)

        return await _run_change(tracked)


async def _run_change(change: Callable[[], T], *invalid_request: type[LlamadoError]) -> T:
    """Change the cluster in its own thread. Raises ApiError.

    Errors of the types `invalid_request` are the request's fault; others may pass if it is repeated.
    """
    try:
        return await _in_thread(change)
    except UnknownWorker as error:
        raise ApiError("not_found_error", str(error)) from None
    except LlamadoError as error:
        if isinstance(error, invalid_request):
            raise invalid(str(error)) from None
        raise ApiError("unavailable_error", str(error), retry_after=RETRY_AFTER) from None


def _in_thread(work: Callable[[], T]) -> Awaitable[T]:
    """Run blocking work in a daemon thread: it takes no thread of the event loop's pool and does not delay shutdown."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # it continues if the client disconnects

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="llamado-cluster", daemon=True).start()
    return asyncio.wrap_future(future)


def _cluster(state: ServerState) -> Response:
    return json_response(orjson.dumps(json_values(cluster_body(state.loaded()))))


def _check_may_move(state: ServerState, request: Request) -> None:
    """Raise ApiError for a request from another machine without the cluster token."""
    if is_local_request(request.scope):
        return
    token = state.switches.cluster_token
    if token is None or not _has_token(token, request):
        # Not 401: the page would ask its user for an API key.
        text = f"moving layers from another machine requires the header {TOKEN} (--cluster-token)"
        raise ApiError("permission_error", text)


def _has_token(token: str, request: Request) -> bool:
    given = request.headers.get(TOKEN, "").encode("latin-1")
    return hmac.compare_digest(digest(given), digest(token.encode()))


def _split_cluster(state: ServerState) -> ServedCluster:
    """Return the cluster of a split model. Raises ApiError if the model is not split."""
    cluster = state.loaded().cluster
    if cluster is None:
        raise not_supported("The model is on this machine only. Start the server with `--rpc` or `--cluster-token`")
    return cluster


def _layout_parts(body: dict[str, Any]) -> list[LayoutPart]:
    """Return the requested layout: `device`, `layers` and `head` of each item of `devices`. Raises ApiError."""
    devices = body.get("devices")
    if not isinstance(devices, list) or len(devices) > _MAX_DEVICES or not all(isinstance(d, dict) for d in devices):
        raise invalid('"devices" must be a list of objects')
    found = []
    for part in devices:
        name, layers, head = part.get("device"), part.get("layers", []), part.get("head", False)
        whole = isinstance(layers, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in layers)
        named = isinstance(name, str) and len(name) <= _MAX_CHARACTERS
        if not named or not whole or not isinstance(head, bool):
            raise invalid('"devices" must contain objects like {"device": "CPU", "layers": [0, 1], "head": true}')
        found.append(LayoutPart(name, tuple(layers), head))
    return found


def _joinable_cluster(state: ServerState, request: Request) -> ServedCluster:
    """Return the cluster that workers can join. Raises ApiError if there is none, or without the token."""
    token = state.switches.cluster_token
    if token is None:
        raise not_supported("Workers cannot join this server. Start it with `--cluster-token`")
    if not _has_token(token, request):
        raise ApiError("authentication_error", f"the header {TOKEN} does not contain the token of --cluster-token")
    if state.sleep is not None and state.sleep.asleep:
        raise ApiError("unavailable_error", "the model is asleep; a request wakes it", retry_after=RETRY_AFTER)
    cluster = state.loaded().cluster
    if cluster is None:
        raise not_supported("Embedding models cannot be split over machines")
    return cluster


def _endpoint(body: dict[str, Any], request: Request) -> str:
    """Return the worker's endpoint: `endpoint`, or `port` (and `tls`) at the client's address. Raises ApiError."""
    endpoint, port, tls = body.get("endpoint"), body.get("port"), body.get("tls", False)
    if isinstance(endpoint, str) and endpoint:
        if len(endpoint) > _MAX_CHARACTERS or not endpoint.isprintable():
            raise invalid(f'"endpoint" must be a string like host:port of at most {_MAX_CHARACTERS} characters')
        return endpoint
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536 or not isinstance(tls, bool):
        raise invalid('"endpoint" must be a string like host:port, or "port" a number from 1 to 65535')
    if request.client is None:
        raise invalid('"endpoint" is required: the address of the client is unknown')
    host = f"[{request.client.host}]" if ":" in request.client.host else request.client.host
    return f"{'tls://' if tls else ''}{host}:{port}"


def _link_to(endpoint: str, state: ServerState) -> str:
    """Return the endpoint by which the engine addresses a worker: in the latency lab, that of its link."""
    return endpoint if state.lab is None else state.lab.link_to(endpoint)


def _decode_speeds(devices: object) -> list[float | None]:
    """Return the decode speed of each device, in bytes per second; None if unknown. Raises ApiError."""
    if not isinstance(devices, list) or len(devices) > _MAX_DEVICES or not all(isinstance(d, dict) for d in devices):
        raise invalid('"devices" must be a list of objects')
    found: list[float | None] = []
    for device in devices:
        speed = device.get("decode")
        good = isinstance(speed, int | float) and not isinstance(speed, bool) and _MIN_SPEED <= speed <= _MAX_SPEED
        found.append(float(speed) if good else None)
    return found
