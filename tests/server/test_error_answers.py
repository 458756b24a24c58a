"""Error responses of access control, which the server and the router share."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from llamado.http.access import Access, AccessRules
from llamado.http.answer import Receive, Scope, Send, error_response
from llamado.http.errors import ApiError

KEY = [(b"authorization", b"Bearer secret")]


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that fails like the routes and the router."""
    await error_response(ApiError("unavailable_error", "busy", retry_after=7), scope["path"])(scope, receive, send)


def call(access: Access, path: str, headers: list[tuple[bytes, bytes]], method: str = "GET") -> tuple[Any, ...]:
    """Return status, headers and body of the answer."""
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("nothing more comes")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(access(scope, receive, send))
    start, *rest = sent
    return start["status"], dict(start["headers"]), b"".join(part.get("body", b"") for part in rest)


@pytest.mark.parametrize(
    ("path", "headers", "draining", "status", "kind", "more"),
    [
        ("/elsewhere", KEY, False, 404, "not_found_error", {}),
        ("/at/x", [], False, 401, "authentication_error", {}),
        ("/at/x", KEY, False, 503, "unavailable_error", {b"retry-after": b"7"}),
        ("/at/x", KEY, True, 503, "unavailable_error", {b"retry-after": b"5", b"connection": b"close"}),
    ],
)
def test_errors_have_one_form(
    path: str, headers: Any, draining: bool, status: int, kind: str, more: dict[bytes, bytes]
) -> None:
    access = Access(application, AccessRules(api_keys=(b"secret",)), "/at")
    access.draining = draining
    found, given, body = call(access, path, headers)
    error = json.loads(body)["error"]
    assert (found, error["code"], error["type"]) == (status, status, kind)
    assert given == {
        b"content-type": b"application/json; charset=utf-8",
        b"content-length": str(len(body)).encode(),
        **more,
    }


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_of_anthropics_api_have_its_form(path: str) -> None:
    for headers, status, kind in (([], 401, "authentication_error"), (KEY, 503, "overloaded_error")):
        access = Access(application, AccessRules(api_keys=(b"secret",)))
        found, _, body = call(access, path, headers)
        answer = json.loads(body)
        assert found == status and answer["type"] == "error"
        assert (answer["error"]["type"], answer["error"]["code"]) == (kind, status)


def test_a_page_of_another_site_gets_a_403() -> None:
    headers = [(b"origin", b"https://evil.example")]
    status, given, body = call(Access(application, AccessRules()), "/x", headers, "POST")
    assert (status, json.loads(body)["error"]["type"]) == (403, "permission_error")
    assert b"access-control-allow-origin" not in given
