"""Access rules in front of a small application: prefix, keys, origins, HEAD, shutdown, and local requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import pytest

from llamado.http.access import (
    HEALTH,
    Access,
    AccessPaths,
    AccessRules,
    busy_app,
    digest,
    is_local_request,
    key_digests,
    key_is_valid,
)
from llamado.http.answer import Receive, Scope, Send, answer
from llamado.http.bodies import SMALL_BODY, body_of

EVIL = "http://evil.example"


class Application:
    """Answers with what it was given. `body`: a part that follows the first one."""

    def __init__(self, body: bytes = b"") -> None:
        self.scopes: list[Scope] = []
        self.running: list[int] = []
        self.access: Access | None = None
        self.body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        self.running.append(-1 if self.access is None else self.access.n_running)
        start = {"type": "http.response.start", "status": 200, "headers": [(b"x", b"1"), (b"content-length", b"9")]}
        await send(start)
        for part in (b"part", self.body):
            await send({"type": "http.response.body", "body": part, "more_body": part != self.body})


Message = dict[str, Any]


def ask(
    app: Callable[[Scope, Receive, Send], Awaitable[None]],
    path: str = "/x",
    method: str = "GET",
    *,
    client: Any = ("::1", 9),
    raw: bytes | None = None,
    **headers: str,
) -> tuple[int, dict[str, str], list[Message]]:
    """Return status, headers and all messages of the response."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("no body is read")

    given = {"host": "localhost", **headers}
    lines = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in given.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": lines, "client": client}
    asyncio.run(app(scope if raw is None else {**scope, "raw_path": raw}, receive, send))
    found = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, sent


def message(sent: list[Message]) -> str:
    return str(json.loads(b"".join(one.get("body", b"") for one in sent))["error"]["message"])


def test_the_prefix_is_removed_from_both_paths() -> None:
    app = Application()
    access = Access(app, AccessRules(), "/llm")
    assert ask(access, "/llm/a b", raw=b"/llm/a%20b")[0] == 200 and ask(access, "/llm/c")[0] == 200
    assert [(scope["path"], scope["raw_path"]) for scope in app.scopes] == [("/a b", b"/a%20b"), ("/c", b"/c")]
    for outside in ("/llm", "/llmx/a", "/a", "/"):
        assert ask(access, outside)[0] == 404, outside
    assert len(app.scopes) == 2


def test_other_protocols_are_ignored() -> None:
    async def fail(*_: Any) -> None:
        raise AssertionError

    asyncio.run(Access(fail, AccessRules())({"type": "websocket"}, fail, fail))


def test_running_requests_are_counted_until_they_end_or_fail() -> None:
    app = Application()
    access = app.access = Access(app, AccessRules())
    ask(access)
    assert app.running == [1] and access.n_running == 0

    async def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    broken = Access(fail, AccessRules())
    with pytest.raises(RuntimeError, match="broken"):
        ask(broken)
    assert broken.n_running == 0


@pytest.mark.parametrize("fails", [False, True])
def test_bodies_are_released_if_no_response_is_sent(fails: bool) -> None:
    """A client that disconnects before the response begins must not keep a share of the budget."""

    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(scope).read(scope, receive)
        assert access.bodies.free < free
        if fails:
            raise RuntimeError("broken")

    async def receive() -> Any:
        return {"type": "http.request", "body": bytes(size), "more_body": False}

    size = SMALL_BODY + 1
    access = Access(read, AccessRules())
    free = access.bodies.free
    headers = [(b"host", b"localhost"), (b"content-length", b"%d" % size)]
    scope = {"type": "http", "method": "POST", "path": "/x", "headers": headers, "client": ("::1", 9)}
    with pytest.raises(RuntimeError, match="broken") if fails else nullcontext():
        asyncio.run(access(scope, receive, receive))
    assert access.bodies.free == free


def test_head_gets_the_headers_of_get() -> None:
    app = Application(b"more")
    status, headers, sent = ask(Access(app, AccessRules()), method="HEAD", origin="http://localhost")
    assert status == 200 and headers["content-length"] == "9" and app.scopes[0]["method"] == "GET"
    assert headers["access-control-allow-origin"] == "http://localhost"
    assert sent[1:] == [{"type": "http.response.body", "body": b"", "more_body": False}]


def test_preflights_need_no_key_and_name_what_is_allowed() -> None:
    rules = AccessRules(api_keys=(b"k",), cors_methods="GET", cors_headers="x-a", cors_credentials=False)
    for rule, allowed in (
        (rules, ("false", "GET", "x-a")),
        (AccessRules(), ("true", "GET, POST, DELETE, OPTIONS", "*")),
    ):
        app = Application()
        status, headers, _ = ask(Access(app, rule), method="OPTIONS")
        names = ("credentials", "methods", "headers")
        assert status == 200 and not app.scopes
        assert tuple(headers[f"access-control-allow-{name}"] for name in names) == allowed


def test_only_liveness_probes_pass_while_unready_or_shutting_down() -> None:
    access = Access(Application(), AccessRules(), unready=lambda path: (503, path.encode()))
    assert {path: ask(access, path)[0] for path in ("/livez", "/healthz", "/health", "/x")} == {
        "/livez": 200, "/healthz": 200, "/health": 503, "/x": 503,
    }  # fmt: skip
    assert ask(access, "/y")[2][-1]["body"] == b"/y"
    access = Access(Application(), AccessRules())
    access.draining = True
    assert [ask(access, path)[0] for path in ("/livez", "/health", "/x")] == [200, 503, 503]
    assert ask(access)[1]["connection"] == "close"


def test_keys_are_checked_except_on_public_paths() -> None:
    access = Access(
        Application(), AccessRules(api_keys=(b"one", b"two")), paths=AccessPaths(public=frozenset({"/open"}))
    )
    assert [ask(access, path)[0] for path in ("/open", "/health", "/x")] == [200, 401, 401]
    for key in ("one", "two"):
        assert ask(access, authorization=f"Bearer {key}")[0] == ask(access, x_api_key=key)[0] == 200
    assert ask(access, authorization="Bearer three")[0] == 401
    assert ask(Access(Application(), AccessRules(api_keys=(b"k",))), "/health")[0] == 200


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Bearer k", "k"),
        ("bearer k", "k"),
        ("BEARER k", "k"),
        ("k", "k"),
        ("Bearer  k", " k"),
        ("Basic k", "Basic k"),
        ("Bearer", "Bearer"),
    ],
)
def test_keys_of_the_authorization_header(header: str, key: str) -> None:
    headers = {b"authorization": header.encode()}
    assert key_digests(headers) == (digest(key.encode()), digest(b""))
    assert key_is_valid(headers, (digest(b"no"), digest(key.encode()))) and not key_is_valid(headers, (digest(b"no"),))
    assert len(digest(b"")) == 32


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, ""),
        *(({name: "x"}, "proxy") for name in ("forwarded", "x_forwarded_for", "x_forwarded_host", "x_real_ip")),
        ({"origin": EVIL}, "pages of other sites"),
        ({"sec_fetch_site": "cross-site"}, "pages of other sites"),
        ({"origin": "http://localhost:5"}, ""),
    ],
)
@pytest.mark.parametrize("path", ["/tools", "/cors-proxy"])
def test_privileged_paths_are_for_local_programs_or_need_a_key(path: str, headers: dict[str, str], reason: str) -> None:
    status, _, sent = ask(Access(Application(), AccessRules()), path, **headers)
    assert (status == 403 and reason in message(sent)) if reason else status == 200
    keyed = Access(Application(), AccessRules(api_keys=(b"k",)))
    assert ask(keyed, path, **headers, x_api_key="k")[0] == 200


@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ({}, True),
        ({"origin": EVIL}, False),
        ({"origin": "null"}, False),
        ({"origin": EVIL, "sec_fetch_site": "same-origin"}, True),
        ({"origin": EVIL, "sec_fetch_site": "same-site"}, True),
        ({"sec_fetch_site": "same-site"}, True),
        ({"sec_fetch_site": "none"}, True),
        ({"sec_fetch_site": "cross-site"}, False),
        ({"origin": "http://LOCALHOST:80", "host": "localhost:80"}, True),
        ({"origin": "http://my.nas:80", "host": "localhost", "x_forwarded_host": "MY.nas:80"}, True),
        ({"origin": "http://my.nas:80", "host": "localhost", "x_forwarded_host": "my.nas:81"}, False),
    ],
)
def test_changes_by_pages_of_other_sites(headers: dict[str, str], is_allowed: bool) -> None:
    paths = AccessPaths(changing=frozenset({"/change"}))
    for path, method in (("/x", "POST"), ("/x", "DELETE"), ("/x", "PUT"), ("/change", "GET")):
        status, _, sent = ask(Access(Application(), AccessRules(), paths=paths), path, method, **headers)
        assert status == (200 if is_allowed else 403), (path, method)
        if not is_allowed:
            assert message(sent).startswith(f"pages of {headers.get('origin', 'another site')} may not")
    for method in ("GET", "HEAD"):
        assert ask(Access(Application(), AccessRules(), paths=paths), method=method, **headers)[0] == 200
    keyed = Access(Application(), AccessRules(api_keys=(b"k",)))
    assert ask(keyed, method="POST", **headers, x_api_key="k")[0] == 200


@pytest.mark.parametrize(
    ("origins", "credentials", "origin", "shown", "is_allowed"),
    [
        ("*", True, EVIL, EVIL, True),
        ("*", True, "", "", True),
        ("*", False, EVIL, "*", True),
        ("localhost", True, EVIL, "", False),
        ("localhost", True, "", "", False),
        ("localhost", True, "https://127.0.0.1:1", "https://127.0.0.1:1", True),
        ("http://a, http://b", True, "http://b", "http://b", True),
        ("http://a, http://b", True, EVIL, "http://a", False),
    ],
)
def test_origins(origins: str, credentials: bool, origin: str, shown: str, is_allowed: bool) -> None:
    rules = AccessRules(cors_origins=origins, cors_credentials=credentials)
    assert rules.shown_origin(origin) == shown and rules.allows(origin) is is_allowed


@pytest.mark.parametrize(
    ("client", "headers", "is_local"),
    [
        (None, {}, True),
        (("127.0.0.1", 1), {}, True),
        (("::1", 1), {}, True),
        (("10.0.0.1", 1), {}, False),
        (("unknown", 1), {}, False),
        (("::1", 1), {"x-forwarded-for": "127.0.0.1, ::1"}, True),
        (("::1", 1), {"x-forwarded-for": "127.0.0.1,10.0.0.1"}, False),
        (("::1", 1), {"x-real-ip": "10.0.0.1"}, False),
        (("::1", 1), {"x-real-ip": "127.0.0.1", "x-other": "10.0.0.1"}, True),
        (("::1", 1), {"x-forwarded-for": ""}, False),
        (("::1", 1), {"forwarded": "for=127.0.0.1"}, False),
        (None, {"x-forwarded-for": "10.0.0.1"}, False),
    ],
)
def test_local_requests(client: Any, headers: dict[str, str], is_local: bool) -> None:
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert is_local_request({"client": client, "headers": lines}) is is_local


def test_a_busy_server_answers_probes_only() -> None:
    app, refused = Application(), list[tuple[str, int]]()
    busy = busy_app(lambda: app, "/llm", lambda scope, status: refused.append((scope["path"], status)))
    assert all(ask(busy, "/llm" + path)[0] == 200 for path in HEALTH) and refused == []
    for path in ("/llm/x", "/health", "/llm/health/"):
        status, headers, sent = ask(busy, path)
        assert status == 503 and headers["connection"] == "close" and headers["retry-after"] == "1"
        assert message(sent) == "too many connections"
    assert refused == [("/llm/x", 503), ("/health", 503), ("/llm/health/", 503)]


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(send, b"")


def test_hosts_are_no_longer_than_they_need_to_be() -> None:
    status, _, sent = ask(Access(nothing, AccessRules()), host="a" * 300)
    assert status == 403 and "'" + "a" * 200 + "'" in message(sent)
