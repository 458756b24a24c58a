"""Host names that a server without a key accepts. A page whose name resolves to this machine sends another one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from llamado.commands.cli import make_parser
from llamado.commands.http_options import access_rules
from llamado.flags import FlagError, parse
from llamado.http.access import Access, AccessPaths, AccessRules
from llamado.http.answer import Receive, Scope, Send, answer


def ask(
    access: Access, *hosts: str, path: str = "/x", method: str = "GET", client: Any = ("::1", 9)
) -> tuple[int, Any]:
    """Return the response's status and error message."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("no body is read")

    headers = [(b"host", host.encode("latin-1")) for host in hosts]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "client": client}
    asyncio.run(access(scope, receive, send))
    return sent[0]["status"], json.loads(sent[-1].get("body") or b"{}").get("error")


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(send, b"{}")


ACCEPTED = (
    "localhost",
    "LocalHost:8080",
    "localhost.",
    "a.localhost:1",
    "127.0.0.1:8080",
    "[::1]:8080",
    "192.168.1.5",
    "",
)
STRANGE = (
    "evil.com", "evil.com:8080", "localhost.evil.com", "127.0.0.1.evil.com", "evil", "[::1", "a b", "\xe9.com",
    "[::1].evil.com", "evil.com@localhost", "localhost/evil.com", "[::1]evil.com:80", "localhost:80:80",
)  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "DELETE"])
@pytest.mark.parametrize("path", ["/", "/health", "/livez", "/v1/models", "/slots", "/nowhere"])
def test_without_a_key_only_known_hosts_are_served(path: str, method: str) -> None:
    access = Access(application, AccessRules())
    for host in ACCEPTED:
        assert ask(access, host, path=path, method=method)[0] == 200, host
    for host in STRANGE:
        status, error = ask(access, host, path=path, method=method)
        assert status == 403 and error["type"] == "permission_error" and "--allowed-hosts" in error["message"], host


def test_requests_with_a_key_or_over_a_unix_socket_need_no_host() -> None:
    assert ask(Access(application, AccessRules(api_keys=(b"k",))), "evil.com", path="/health")[0] == 200
    assert ask(Access(application, AccessRules()), "evil.com", client=None)[0] == 200
    assert ask(Access(application, AccessRules()))[0] == 200  # HTTP/1.0, which browsers do not speak


def test_guarded_paths_accept_any_host() -> None:
    access = Access(application, AccessRules(), paths=AccessPaths(guarded=frozenset({"/cluster/join"})))
    assert ask(access, "evil.com", path="/cluster/join")[0] == 200
    assert ask(access, "evil.com", path="/cluster")[0] == 403


def test_two_host_headers_are_rejected() -> None:
    for rules in (AccessRules(), AccessRules(api_keys=(b"k",))):
        status, error = ask(Access(application, rules), "localhost", "evil.com")
        assert status == 400 and "Host" in error["message"]


@pytest.mark.parametrize(
    ("flags", "allowed", "refused"),
    [
        (
            "--allowed-hosts Llama.example.com",
            "llama.example.com:80 LLAMA.example.com.",
            "example.com a.llama.example.com",
        ),
        ("--allowed-hosts .example.com,nas", "example.com a.b.example.com nas", "badexample.com example.com.evil.com"),
        ("--allowed-hosts a --allowed-hosts b", "a b", "c"),
        ("--allowed-hosts *", "anything.at.all", ""),
        ("--host my-machine,127.0.0.1", "my-machine", "other"),
        ("--host /tmp/a.sock", "", "/tmp/a.sock"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_allowed_hosts_come_from_flags(command: str, flags: str, allowed: str, refused: str) -> None:
    rules = access_rules(parse(make_parser(command), command, flags.split(), {})[0])
    for host in allowed.split():
        assert rules.allows_host(host), host
    for host in refused.split():
        assert not rules.allows_host(host), host


@pytest.mark.parametrize("name", ["http://a", "a:80", "a/b", "*.a", "a b"])
def test_malformed_hosts_are_refused(name: str) -> None:
    with pytest.raises(FlagError, match="--allowed-hosts"):
        access_rules(parse(make_parser("serve"), "serve", ["--allowed-hosts", name], {})[0])
