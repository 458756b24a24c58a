"""`/cors-proxy`: forwarded requests, rejected ones, and access."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from fakes import client

from llamado.tools import proxy
from llamado.tools.settings import ToolSettings

LOCAL = {"host": "localhost:8080"}
PROXY = ToolSettings(proxy=True)
PREFIX = "x-llama-server-proxy-header-"


PASSED_BACK = {"mcp-session-id": "7", "mcp-protocol-version": "2025-06-18", "retry-after": "9"}
KEPT_AWAY = {
    "access-control-allow-origin": "http://evil.example",
    "alt-svc": 'h2="evil.example:443"',
    "clear-site-data": '"*"',
    "link": "</a>; rel=preload",
    "location": "http://evil.example",
    "nel": "{}",
    "refresh": "0; url=http://evil.example",
    "report-to": "{}",
    "service-worker-allowed": "/",
    "set-cookie": "a=b",
    "strict-transport-security": "max-age=99",
    "www-authenticate": "Basic",
    "x-own": "any other",
}


class Other(BaseHTTPRequestHandler):
    """Another server: returns the request, redirects, or answers in pieces."""

    def do_GET(self) -> None:
        if self.path == "/from":
            self.send_response(307)
            self.send_header("location", "/to?a=b")
            self.end_headers()
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(418)
        self.send_header("content-type", "text/html")
        for name, value in {**PASSED_BACK, **KEPT_AWAY}.items():
            self.send_header(name, value)
        self.end_headers()
        names = ",".join(sorted(name.lower() for name in self.headers))
        self.wfile.write(f"{self.command} {self.path} {names} {self.headers.get('x-key')} ".encode() + body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


async def test_requests_are_forwarded(other: str) -> None:
    async with client(tools=PROXY) as http:
        headers = LOCAL | {
            PREFIX + "x-key": "k",
            PREFIX + "host": "evil",
            "authorization": "Bearer mine",
            "cookie": "c=d",
            "a-header-of-this-servers-own-which-is-long": "e",
        }
        url = {"url": f"{other}/mcp?x=1&y=2"}
        answer = await http.post("/cors-proxy", params=url, headers=headers, content=b"body")
        assert answer.status_code == 418
        method, path, names, key, body = answer.text.split(" ")
        assert (method, path, key, body) == ("POST", "/mcp?x=1&y=2", "k", "body")
        assert set(names.split(",")) <= {
            "accept", "accept-encoding", "connection", "content-length", "host", "user-agent", "x-key",
        }  # fmt: skip
        returned = answer.headers
        assert returned["content-type"] == "text/html" and PASSED_BACK.items() <= returned.items()
        assert not KEPT_AWAY.keys() & returned.keys()
        assert returned["content-security-policy"] == "sandbox" and returned["x-content-type-options"] == "nosniff"
        answer = await http.get("/cors-proxy", params={"url": f"{other}/from"}, headers=LOCAL)
        assert answer.text.startswith("GET /to?a=b ")
        assert (await http.get("/props")).json()["cors_proxy_enabled"] is True


async def test_simultaneous_first_requests_open_one_client(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    open_one = proxy._open

    def count() -> httpx.AsyncClient:
        opened.append(1)
        return open_one()

    monkeypatch.setattr(proxy, "_open", count)
    async with client(tools=PROXY) as http:
        asked = [http.get("/cors-proxy", params={"url": f"{other}/a"}, headers=LOCAL) for _ in range(8)]
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {418}
    assert len(opened) == 1


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "invalid URL: no scheme"),
        ("file:///etc/passwd", "unsupported URL scheme: file"),
        ("http://", "invalid target URL: missing host"),
        ("http://a:b@127.0.0.1/", "authentication in target URL is not supported"),
        ("http://127.0.0.1:99999/", "invalid URL: Port out of range 0-65535"),
        ("http://127.0.0.1:1/", "proxy error: All connection attempts failed"),
    ],
)
async def test_rejected_targets(url: str, why: str) -> None:
    async with client(tools=PROXY) as http:
        answer = await http.get("/cors-proxy", params={"url": url}, headers=LOCAL)
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, why)


async def test_other_machines_and_sites_are_refused(other: str) -> None:
    async with client(tools=PROXY) as http:
        cross = LOCAL | {"sec-fetch-site": "cross-site"}
        for headers in ({"host": "evil.example"}, cross, LOCAL | {"origin": "null"}):
            for method in ("GET", "POST"):
                answer = await http.request(method, "/cors-proxy", params={"url": other}, headers=headers)
                assert answer.status_code == 403
                assert "need a key" in answer.text or "--allowed-hosts" in answer.text
    async with client() as http:
        answer = await http.get("/cors-proxy", params={"url": other}, headers=LOCAL)
        assert answer.status_code == 403 and answer.json()["error"]["type"] == "feature_disabled"
        assert (await http.get("/props")).json()["cors_proxy_enabled"] is False
