"""Vertex AI's predict route: one request with several instances, each of them a request to another endpoint.

`AIP_…` variables configure the container
(https://docs.cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements). An instance names its endpoint
under `@requestFormat`, by its path or by the path in camel case, as in llama-server (`server-http.cpp`, b11434).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

from llamado.http.answer import json_response
from llamado.http.bodies import Body, BodyBudget
from llamado.http.errors import ApiError, invalid
from llamado.http.json_body import read_json
from llamado.server.api.routes import Routes

log = logging.getLogger("llamado.server")

MOST_INSTANCES = 128
_FORMAT = "@requestFormat"
# Keys of the ASGI scope that an inner request copies from the outer one.
_SHARED = ("type", "asgi", "http_version", "scheme", "server", "client", "root_path", "query_string")


def format_name(path: str) -> str:
    """Return a path in camel case without the version: `chatCompletions` for `/v1/chat/completions`."""
    first, *others = re.split("[/_-]", path.removeprefix("/v1").removeprefix("/").partition("{")[0].rstrip("/"))
    return first + "".join(word[:1].upper() + word[1:] for word in others)


def predict_router(app: ASGIApp, route: str, paths: Sequence[str]) -> Routes:
    """Return the predict route. `paths`: endpoints of `app` for instances; the first of several with one name wins."""
    router = Routes("generate")
    if route in paths:
        log.error("AIP_PREDICT_ROUTE=%s is the path of another endpoint: the predict route is off", route)
        return router
    names: dict[str, str] = {path: path for path in paths}
    for path in paths:
        names.setdefault(format_name(path), path)

    @router.post(route, hidden=True)
    async def predict(request: Request) -> Response:
        body = await read_json(request)
        if not isinstance(body, dict):
            raise invalid("request body must be a JSON object")
        instances = body.get("instances")
        if not isinstance(instances, list):
            raise invalid("request body must include an array field named instances")
        if len(instances) > MOST_INSTANCES:
            raise invalid(f"instances array exceeds maximum size of {MOST_INSTANCES}")
        answers = await asyncio.gather(*(_answer(app, request, names, instance) for instance in instances))
        return json_response(b'{"predictions":[' + b",".join(answers) + b"]}")

    return router


async def _answer(app: ASGIApp, request: Request, names: Mapping[str, str], instance: Any) -> bytes:
    """Return the answer of an instance's endpoint as JSON; errors are answers, too."""
    if not isinstance(instance, dict):
        return invalid("each instance must be a JSON object").body
    wanted = instance.get(_FORMAT)
    if not isinstance(wanted, str):
        return invalid(f"each instance must include a string {_FORMAT}").body
    path = names.get(wanted)
    if path is None:
        return invalid(f"no handler registered for {_FORMAT}: {wanted[:200]}").body
    fields = {name: value for name, value in instance.items() if name != _FORMAT}
    if "stream" in fields:
        fields["stream"] = False  # one answer holds all predictions
    answer = await _call(app, request, path, orjson.dumps(fields))
    try:
        orjson.loads(answer)
    except orjson.JSONDecodeError:
        return orjson.dumps(answer.decode("utf-8", "replace")) if answer else b"null"
    return answer


async def _call(app: ASGIApp, request: Request, path: str, body: bytes) -> bytes:
    """Call an endpoint and return the body of its answer; a disconnect of the client cancels it."""
    scope: Scope = {name: request.scope[name] for name in _SHARED if name in request.scope}
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-length"]
    scope.update(method="POST", path=path, raw_path=path.encode(), headers=headers)
    scope["llamado.body"] = Body(BodyBudget())  # the outer request's body counts for the memory limit
    parts: list[bytes] = []
    sent = False

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await request.receive()

    try:
        await app(scope, receive, send)
    except Exception as error:
        if not parts:
            return ApiError("server_error", f"{type(error).__name__}: {error}").body
    return b"".join(parts)
