"""Routes of router and gateway: fixed paths, parameters, methods, and the endpoint names in the metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from llamado.http.answer import App
from llamado.http.errors import ApiError
from llamado.http.routing import ANY, ApiRoute, ApiRouter


async def describe(request: Request) -> App:
    return Response(f"{request.scope['route'].path} {request.path_params}")


ROUTER = ApiRouter(
    [
        ApiRoute("GET", "/models", describe),
        ApiRoute("POST", "/models", describe),
        ApiRoute("GET", "/models/sse", describe),
        ApiRoute("GET", "/models/{name:path}", describe),
        ApiRoute("POST", "/slots/{id}", describe),
        ApiRoute(ANY, "/props", describe),
        ApiRoute("GET", "/props", describe),
        ApiRoute("GET", "/logs/{kind:path}", describe, name="/logs"),
    ]
)


def get(method: str, path: str) -> str:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("routing reads no body")

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    asyncio.run(ROUTER(scope, receive, send))
    return b"".join(message.get("body", b"") for message in sent).decode()


@pytest.mark.parametrize(
    ("method", "path", "found", "endpoint"),
    [
        ("GET", "/models", "/models {}", "/models"),
        ("POST", "/models", "/models {}", "/models"),
        ("GET", "/models/sse", "/models/sse {}", "/models/sse"),
        ("GET", "/models/a/b:c\n", "/models/{name:path} {'name': 'a/b:c\\n'}", "/models/{name}"),
        ("GET", "/models/", "/models/{name:path} {'name': ''}", "/models/{name}"),
        ("POST", "/slots/0", "/slots/{id} {'id': '0'}", "/slots/{id}"),
        ("PUT", "/props", "/props {}", "/props"),
        ("GET", "/logs/x", "/logs/{kind:path} {'kind': 'x'}", "/logs"),
    ],
)
def test_requests_are_routed(method: str, path: str, found: str, endpoint: str) -> None:
    assert get(method, path) == found
    assert ROUTER.endpoint(method, path) == endpoint


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("GET", "/nope"), ("PUT", "/models"), ("POST", "/slots/"), ("POST", "/slots/0/1")],
)
def test_unknown_paths_and_wrong_methods_are_404(method: str, path: str) -> None:
    with pytest.raises(ApiError) as error:
        get(method, path)
    assert error.value.status == 404 and ROUTER.endpoint(method, path) == ""
