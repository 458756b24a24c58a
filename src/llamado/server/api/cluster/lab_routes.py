"""Endpoints of `/lab` (`--lab`): slow links down and kill workers while the server runs."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.errors import LlamadoError
from llamado.http.answer import json_response
from llamado.http.json_body import read_object
from llamado.server.api.routes import Routes
from llamado.server.errors import invalid, not_supported
from llamado.server.model import LabLink, ServedLab
from llamado.server.state import ServerState


@dataclass(frozen=True)
class LabBody:
    """Body of `/lab`; without links if the lab is off."""

    on: bool
    links: tuple[LabLink, ...]


def lab_router(state: ServerState) -> Routes:
    """Return the routes of the latency lab."""
    router = Routes("lab")

    @router.get("/lab")
    async def lab(_: Request) -> Response:
        return _answer(state.lab)

    @router.post("/lab/links")
    async def lab_links(request: Request) -> Response:
        lab = _require_lab(state)
        links = _link_settings(await read_object(request))
        try:
            await asyncio.to_thread(lab.set, links)
        except LlamadoError as error:
            raise invalid(str(error)) from None
        return _answer(lab)

    @router.post("/lab/kill")
    async def lab_kill(request: Request) -> Response:
        return await _change_worker(request, kill=True)

    @router.post("/lab/start")
    async def lab_start(request: Request) -> Response:
        return await _change_worker(request, kill=False)

    async def _change_worker(request: Request, *, kill: bool) -> Response:
        lab = _require_lab(state)
        endpoint = (await read_object(request)).get("endpoint")
        if not isinstance(endpoint, str):
            raise invalid('"endpoint" must be an endpoint of /lab')
        try:
            await asyncio.to_thread(lab.kill if kill else lab.start, endpoint)
        except LlamadoError as error:
            raise invalid(str(error)) from None
        return _answer(lab)

    return router


def _require_lab(state: ServerState) -> ServedLab:
    if state.lab is None:
        raise not_supported("The latency lab is off. Start the server with `--lab`")
    return state.lab


def _answer(lab: ServedLab | None) -> Response:
    return json_response(orjson.dumps(LabBody(lab is not None, () if lab is None else tuple(lab.view()))))


def _link_settings(body: dict[str, Any]) -> dict[str, tuple[float, float, float | None]]:
    """Return delay and jitter (ms) and bandwidth (bits per second; None for no limit) by endpoint. Raises ApiError."""
    links = body.get("links")
    if not isinstance(links, list) or not all(isinstance(link, dict) for link in links):
        raise invalid('"links" must be a list of objects')
    found = {}
    for link in links:
        endpoint, bandwidth = link.get("endpoint"), link.get("bandwidth")
        if not isinstance(endpoint, str):
            raise invalid('"endpoint" must be an endpoint of /lab')
        latency, jitter = (_number(link.get(name, 0.0), name) for name in ("latency_ms", "jitter_ms"))
        found[endpoint] = latency, jitter, None if bandwidth is None else _number(bandwidth, "bandwidth")
    return found


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise invalid(f'"{name}" must be a number, 0 or more')
    return float(value)
