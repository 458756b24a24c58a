"""Access rules of every route: all methods, with and without keys, from all kinds of origins."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kept_connection import KeptConnection
from tiers import first_of
from wire import Wire, serving

from llamado.http.access import HEALTH, LIVE, PRIVILEGED, AccessRules
from llamado.http.errors import OLLAMA
from llamado.page.chats_api import is_chats_path
from llamado.page.files import page_paths
from llamado.server.api.cluster.cluster_routes import MEMBER_PATHS
from llamado.server.app import create_app
from llamado.server.state import ServerState

METHODS = ("GET", "HEAD", "POST", "OPTIONS", "DELETE", "PUT")
LOCAL, FOREIGN = "http://localhost:5173", "http://evil.example"
KEYS: dict[str, tuple[dict[str, str], bool]] = {
    "none": ({}, False),
    "wrong": ({"Authorization": "Bearer sesam"}, False),
    "empty": ({"Authorization": "Bearer", "X-Api-Key": ""}, False),
    "bearer": ({"Authorization": "Bearer sesame"}, True),
    "x-api-key": ({"X-Api-Key": "sesame"}, True),
}
PUBLIC = HEALTH | MEMBER_PATHS | page_paths()
ASSET = min(path for path in page_paths() if path.startswith("/assets/"))
ALLOWED = "Access-Control-Allow-Origin"


def table() -> dict[str, set[str]]:
    """Return the methods of each path of the application, and those of a path that does not exist: none."""

    async def work() -> Any:
        return create_app(ServerState())

    door = asyncio.run(work())
    found: dict[str, set[str]] = {"/nowhere": set()}
    for route in door._app.router.routes:
        path = ASSET if route.path == "/assets/{file}" else route.path.replace("{name:path}", "fake")
        path = re.sub(r"\{.*?\}", "0", path)
        found.setdefault(path, set()).update(route.methods)
    assert len(found) > 30
    return found


ROUTES = table()


def error_of(answer: httpx.Response, path: str) -> str:
    """Return the message of an error in the form of its path's API."""
    error = answer.json()["error"]
    assert isinstance(error, str) == (path in OLLAMA), path
    return str(error if path in OLLAMA else error["message"])


@contextlib.contextmanager
def locked_server(prefix: str) -> Iterator[tuple[Wire, KeptConnection]]:
    """A server with a key."""
    rules = AccessRules(api_keys=(b"other", b"sesame"))
    with (
        serving(access=rules, api_prefix=prefix, metrics=True, props=True) as wire,
        contextlib.closing(KeptConnection(wire.url, prefix, Origin=LOCAL)) as http,
    ):
        yield wire, http


@pytest.fixture(scope="module", params=first_of(["", "/llm"]))
def locked(request: pytest.FixtureRequest) -> Iterator[tuple[Wire, KeptConnection]]:
    with locked_server(request.param) as found:
        yield found


@pytest.mark.slow
def test_every_route_has_the_prefix() -> None:
    with locked_server("/llm") as (wire, http):
        outside = KeptConnection(wire.url, Origin=LOCAL)
        for path, methods in ROUTES.items():
            for method in methods:
                assert http.ask(method, path).status_code == 401 or path in PUBLIC, path
                assert http.ask(method, path, **KEYS["bearer"][0]).status_code not in (401, 404), path
                answer = outside.ask(method, path, **KEYS["bearer"][0])
                assert answer.status_code == 404 and answer.headers[ALLOWED] == LOCAL, path
        outside.close()


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_every_route_checks_key_and_origin(locked: tuple[Wire, KeptConnection], path: str) -> None:
    wire, http = locked
    for method in METHODS:
        exists = method in ROUTES[path] or (method == "HEAD" and "GET" in ROUTES[path])
        for name, (headers, right) in KEYS.items():
            answer = http.ask(method, path, **headers)
            case = (method, path, name, answer.status_code, answer.text[:100])
            assert answer.headers[ALLOWED] == LOCAL, case
            if method == "HEAD":
                assert answer.content == b"", case
            if method == "OPTIONS":
                assert answer.status_code == 200, case
                assert answer.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE, OPTIONS", case
            elif not right and path not in PUBLIC:
                assert answer.status_code == 401, case
                if method != "HEAD":
                    assert error_of(answer, path) == "Invalid API Key", case
            elif not exists:
                assert answer.status_code == 404, case
                if method != "HEAD":
                    assert error_of(answer, path) == "File Not Found", case
            elif path in PRIVILEGED:
                assert answer.status_code == 403, case
                assert method == "HEAD" or answer.json()["error"]["type"] == "feature_disabled", case
            else:
                assert answer.status_code not in (401, 403, 404, 405, 500), case
    if wire.state.switches.api_prefix:
        outside = httpx.get(wire.url + path, headers={"X-Api-Key": "sesame", "Origin": LOCAL})
        assert outside.status_code == 404 and outside.headers[ALLOWED] == LOCAL


@pytest.mark.slow
def test_routes_return_503_while_the_model_is_loading() -> None:
    """503 comes before 401, so that the page, which is available, can show the progress without a key."""
    with (
        serving(loaded=False, access=AccessRules(api_keys=(b"sesame",))) as wire,
        contextlib.closing(KeptConnection(wire.url, Origin=LOCAL)) as http,
    ):
        for path in [path for path in ROUTES if path not in LIVE]:
            for method in METHODS:
                answer = http.ask(method, path)
                shown = path in page_paths() and method in ("GET", "HEAD")
                # Metrics are available while loading, with a key.
                other = 404 if path in page_paths() else 401 if path == "/metrics" or is_chats_path(path) else 503
                assert answer.status_code == (200 if shown or method == "OPTIONS" else other), (method, path)
                assert answer.headers[ALLOWED] == LOCAL


@pytest.fixture(scope="module")
def open_server() -> Iterator[KeptConnection]:
    with serving(metrics=True, props=True) as wire, contextlib.closing(KeptConnection(wire.url)) as http:
        yield http


@pytest.mark.parametrize("path", sorted(ROUTES.keys() - PRIVILEGED))  # see test_tools_api.py
def test_requests_of_other_sites_change_nothing(open_server: KeptConnection, path: str) -> None:
    """A server without keys refuses changes by other sites, and its CORS headers keep them from reading answers."""
    for method in ("GET", "POST", "DELETE"):
        changes = method != "GET"
        for headers in ({"Origin": FOREIGN}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
            answer = open_server.ask(method, path, **headers)
            assert (answer.status_code == 403) == changes, (method, path, headers)
            assert ALLOWED not in answer.headers
        for headers in (
            {},
            {"Origin": LOCAL},
            {"Origin": f"http://{open_server.host}"},
            {"Origin": FOREIGN, "Sec-Fetch-Site": "same-origin"},
            {"Origin": FOREIGN, "X-Forwarded-Host": "evil.example"},
        ):
            assert open_server.ask(method, path, **headers).status_code != 403, (method, path, headers)


@pytest.mark.parametrize(
    ("rules", "origin", "status", "shown"),
    [
        (AccessRules(cors_origins="*"), FOREIGN, 200, FOREIGN),
        (AccessRules(cors_origins="*", cors_credentials=False), FOREIGN, 200, "*"),
        (AccessRules(cors_origins=f"http://a.b, {FOREIGN}"), FOREIGN, 200, FOREIGN),
        (AccessRules(cors_origins="http://a.b"), FOREIGN, 403, "http://a.b"),
        (AccessRules(), "http://localhost.evil.example", 403, None),
        (AccessRules(), "http://[::1]:80", 200, "http://[::1]:80"),
        (AccessRules(), "http://[", 403, None),
        (AccessRules(), "localhost:5173", 200, "localhost:5173"),
        (AccessRules(), "localhost.evil.example", 403, None),
        (AccessRules(cors_origins="localhost"), LOCAL, 200, LOCAL),
        (AccessRules(cors_origins="localhost"), "http://localhost.evil.example", 403, None),
        (AccessRules(api_keys=(b"k",)), FOREIGN, 200, None),
    ],
)
def test_cors_origins(rules: AccessRules, origin: str, status: int, shown: str | None) -> None:
    with serving(access=rules) as wire:
        headers = {"Origin": origin, "X-Api-Key": "k"}
        answer = httpx.post(f"{wire.url}/tokenize", json={"content": "a"}, headers=headers)
    assert answer.status_code == status and answer.headers.get(ALLOWED) == shown
    if status == 403:
        assert "--cors-origins" in answer.json()["error"]["message"]
