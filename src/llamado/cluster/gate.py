"""The door in front of the router: keys, origins, the prefix of all paths."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any

from llamado.cluster.proxy import Receive, Scope, Send
from llamado.server.app import allowed_origin
from llamado.server.errors import ApiError, not_found
from llamado.server.state import AccessRules

PUBLIC = frozenset({"/health", "/v1/health"})

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=32).digest()


class Gate:
    """Checks every request before the router sees it."""

    def __init__(self, app: App, access: AccessRules, prefix: str) -> None:
        self._app = app
        self._access = access
        self._prefix = prefix
        self._keys = [_digest(key) for key in access.api_keys]
        # With a fixed answer nothing has to be worked out for each request.
        self._cors = [
            (b"access-control-allow-credentials", b"true" if access.cors_credentials else b"false"),
            (b"access-control-allow-methods", access.cors_methods.encode("latin-1")),
            (b"access-control-allow-headers", access.cors_headers.encode("latin-1")),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        origin = allowed_origin(self._access, headers.get(b"origin", b"").decode("latin-1"))
        if origin:
            send = _with_origin(send, origin.encode("latin-1"))
        scope = dict(scope)
        if self._prefix:
            if not scope["path"].startswith(self._prefix + "/"):
                await answer(send, not_found().body, 404)
                return
            scope["path"] = scope["path"][len(self._prefix) :]
            scope["raw_path"] = scope["raw_path"][len(self._prefix) :]
        if scope["method"] == "OPTIONS":
            # Browsers send these without a key, before the request proper.
            await answer(send, b"", 200, [*self._cors, (b"content-type", b"text/html")])
            return
        if self._keys and scope["path"] not in PUBLIC and not self._known(headers):
            error = ApiError("authentication_error", "Invalid API Key")
            await answer(send, error.body, error.status)
            return
        if scope["method"] == "HEAD":
            scope["method"] = "GET"  # the server leaves the body out by itself
        await self._app(scope, receive, send)

    def _known(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a key fits; the time it takes tells nothing of the keys."""
        bearer = headers.get(b"authorization", b"")
        if bearer[:7].lower() == b"bearer ":
            bearer = bearer[7:]
        given = (_digest(bearer), _digest(headers.get(b"x-api-key", b"")))
        return max([hmac.compare_digest(one, key) for one in given for key in self._keys])


def _with_origin(send: Send, origin: bytes) -> Send:
    async def send_with_origin(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"access-control-allow-origin", origin)]
        await send(message)

    return send_with_origin


JSON = (b"content-type", b"application/json; charset=utf-8")


async def answer(send: Send, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Send a whole answer; JSON unless the headers say otherwise."""
    given = [JSON] if headers is None else headers
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*given, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
