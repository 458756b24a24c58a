"""`/cors-proxy`: forwards the page's requests to MCP servers that do not allow cross-origin requests.

The endpoint is llama-server's (tools/server/server-cors-proxy.h, b11434).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from llamado.http.answer import error_response
from llamado.http.bodies import body_of
from llamado.http.errors import ApiError
from llamado.http.streams import PartStream

if TYPE_CHECKING:
    import httpx

_PREFIX = "x-llama-server-proxy-header-"
"""Prefix of the headers that are forwarded; all others are dropped."""
_NOT_ASKED = frozenset({"accept-encoding", "connection", "content-length", "host", "transfer-encoding"})
# The headers that MCP over HTTP needs. A browser would apply others to this server's origin: Clear-Site-Data deletes
# the page's chats, Refresh and Strict-Transport-Security redirect it, Set-Cookie is sent back.
_PASSED_BACK = frozenset({"content-encoding", "content-type", "mcp-protocol-version", "mcp-session-id", "retry-after"})
_SECONDS = 600.0
# The browser attributes the response to this server's origin, so it must not run as this server's page.
_HARMLESS = {"content-security-policy": "sandbox", "x-content-type-options": "nosniff", "x-accel-buffering": "no"}


class McpProxy:
    """Forwards GET and POST requests."""

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None
        self._opening = asyncio.Lock()

    async def pass_on(self, request: Request) -> Response:
        """Forward a request and stream the response."""
        url = request.query_params.get("url", "")
        if fault := _fault(url):
            return error_response(ApiError("server_error", fault))
        async with self._opening:  # loading certificates holds the interpreter's lock: once, not for each request
            if self._client is None:
                self._client = await asyncio.to_thread(_open)
            client = self._client
        headers = {
            name[len(_PREFIX) :]: value
            for name, value in request.headers.items()
            if name.startswith(_PREFIX) and name[len(_PREFIX) :] not in {"", *_NOT_ASKED}
        }
        body = await body_of(request.scope).read(request.scope, request.receive) if request.method == "POST" else b""
        import httpx

        try:
            outgoing = client.build_request(request.method, url, headers=headers, content=body or None)
            response = await client.send(outgoing, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return error_response(ApiError("server_error", f"proxy error: {error or type(error).__name__}"))
        shown = {name: value for name, value in response.headers.items() if name in _PASSED_BACK}
        return PartStream(_pieces(response), response.status_code, shown | _HARMLESS)


def _fault(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, password, _ = parts.hostname, parts.password, parts.port
    except ValueError as error:
        return f"invalid URL: {error}"
    if not parts.scheme:
        return "invalid URL: no scheme"
    if parts.scheme not in ("http", "https"):
        return f"unsupported URL scheme: {parts.scheme}"
    if not host:
        return "invalid target URL: missing host"
    return "authentication in target URL is not supported" if password else ""


def _open() -> httpx.AsyncClient:
    from http.cookiejar import CookieJar, DefaultCookiePolicy

    import httpx

    no_cookies = CookieJar(policy=DefaultCookiePolicy(allowed_domains=[]))  # clients must not share cookies
    client = httpx.AsyncClient(follow_redirects=True, timeout=_SECONDS, trust_env=False, cookies=no_cookies)
    client.headers = httpx.Headers({"accept-encoding": "identity"})
    return client


async def _pieces(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()
