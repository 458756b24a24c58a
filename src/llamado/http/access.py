"""Access control: path prefix, Host and Origin checks, API keys, HEAD, and refusals during shutdown."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

from llamado.http.answer import App, Receive, Scope, Send, answer, error_response
from llamado.http.bodies import MAX_BODY, Body, BodyBudget
from llamado.http.errors import ApiError, not_found, shutting_down

LIVE = frozenset({"/livez", "/healthz"})
"""Liveness probes. They are answered while the model loads and during shutdown, too."""
HEALTH = LIVE | {"/health", "/v1/health", "/readyz"}
"""Probe paths. They never need a key."""
PRIVILEGED = frozenset({"/tools", "/cors-proxy"})
"""Paths that act with the rights of the server's user. Without a key, they are for local programs and allowed pages."""

Headers = dict[bytes, bytes]

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})  # RFC 9110, 9.2.1; TRACE is not served
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
# Headers by which proxies name the original client.
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s\[\]:/?#@\\]*))(?::[0-9]*)?")
"""A host name and an optional port (RFC 9110, 7.2)."""


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """Access rules: API keys, allowed host names, and CORS settings."""

    api_keys: tuple[bytes, ...] = ()
    cors_origins: str = "localhost"
    """`*`, `localhost`, or a comma-separated list of origins."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in `Host` that are served without a key: `name`, `.suffix` for a domain and its subdomains, `*` for all."""
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True

    def allows(self, origin: str) -> bool:
        """Return True if pages of `origin` may send requests."""
        if self.cors_origins == "*":
            return True
        if self.cors_origins == "localhost":
            return _is_local(origin)
        return origin in self._origins

    def shown_origin(self, origin: str) -> str:
        """Return the value of Access-Control-Allow-Origin for a request's Origin; "" for no header."""
        if self.cors_origins == "*":
            # Browsers reject "*" for requests with credentials, so the origin itself is returned.
            return origin if self.cors_credentials else "*"
        if self.cors_origins == "localhost":
            return origin if origin and _is_local(origin) else ""
        return origin if origin in self._origins else self._origins[0]

    def allows_host(self, host: str) -> bool:
        """Return True if a request without a key may name this server `host` (name and port).

        Addresses and names of the loopback interface always pass: no DNS server can point them at another machine.
        """
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = (found["v6"] or found["name"]).lower().rstrip(".")
        if (
            name == "localhost"
            or name.endswith(".localhost")
            or any(_covers(rule, name) for rule in self.allowed_hosts)
        ):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    @property
    def _origins(self) -> list[str]:
        return [origin.strip() for origin in self.cors_origins.split(",")]


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin if "://" in origin else f"//{origin}").hostname in _LOCAL
    except ValueError:
        return False


def _covers(rule: str, name: str) -> bool:
    """Return True if a rule of `allowed_hosts` covers a name in lower case."""
    rule = rule.lower().rstrip(".")
    return rule == "*" or name == rule.removeprefix(".") or (rule.startswith(".") and name.endswith(rule))


@dataclass(frozen=True, kw_only=True)
class AccessPaths:
    """Paths with rules of their own."""

    public: frozenset[str] = HEALTH
    """Paths that need no key."""
    guarded: frozenset[str] = frozenset()
    """Paths that check their own secret, so any Host may name them."""
    changing: frozenset[str] = frozenset()
    """Paths that change state although clients request them with GET."""


class Access:
    """ASGI middleware that checks every request before `app` gets it.

    `unready`: returns status and body of a refusal for a path; None passes the request on to `app`. `max_body`: returns
    the most bytes of a request's body.
    """

    def __init__(
        self,
        app: App,
        rules: AccessRules,
        prefix: str = "",
        paths: AccessPaths = AccessPaths(),
        *,
        unready: Callable[[str], tuple[int, bytes] | None] = lambda path: None,
        max_body: Callable[[], int] = lambda: MAX_BODY,
    ) -> None:
        self._app = app
        self._rules = rules
        self._prefix = prefix
        self._paths = paths
        self._unready = unready
        self._keys = tuple(map(digest, rules.api_keys))
        self._preflight = [
            (b"access-control-allow-credentials", b"true" if rules.cors_credentials else b"false"),
            (b"access-control-allow-methods", rules.cors_methods.encode("latin-1")),
            (b"access-control-allow-headers", rules.cors_headers.encode("latin-1")),
            (b"content-type", b"text/html"),
        ]
        self.bodies = BodyBudget(max_body=max_body)
        self.draining = False
        """True during shutdown: running requests are finished, new ones are refused."""
        self.on_drain: Callable[[], None] = lambda: None
        """Called when the shutdown begins."""
        self.n_running = 0
        """Requests that `app` is processing."""

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True
        self.on_drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = Body(self.bodies)
        try:
            await self._answer({**scope, "llamado.body": body}, receive, self._wrap_send(scope, body, send))
        finally:
            body.release()

    def _wrap_send(self, scope: Scope, body: Body, send: Send) -> Send:
        """Wrap `send`: add the CORS header, and release the request's body when the response starts."""
        origin = self._rules.shown_origin(dict(scope["headers"]).get(b"origin", b"").decode("latin-1"))
        more = [(b"access-control-allow-origin", origin.encode("latin-1"))] if origin else []

        async def send_with_cors(message: Any) -> None:
            if message["type"] == "http.response.start":
                body.release()
                message["headers"] = [*message["headers"], *more]
            await send(message)

        return send_with_cors

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        if self._prefix:
            if not path.startswith(self._prefix + "/"):
                await error_response(not_found())(scope, receive, send)
                return
            scope["raw_path"] = scope.get("raw_path", path.encode())[len(self._prefix) :]
            path = scope["path"] = path[len(self._prefix) :]
        if (wrong := self._wrong_host(scope, headers, path)) is not None:
            await error_response(wrong, path)(scope, receive, send)
            return
        if scope["method"] == "OPTIONS":
            # Browsers send preflight requests without a key.
            await answer(send, b"", 200, self._preflight)
            return
        live = path in LIVE
        unready = None if live else self._unready(path)
        if unready is not None:
            await answer(send, unready[1], unready[0])
            return
        if self.draining and not live:
            await error_response(shutting_down(), path, close=True)(scope, receive, send)
            return
        if self._keys and path not in self._paths.public and not key_is_valid(headers, self._keys):
            await error_response(ApiError("authentication_error", "Invalid API Key"), path)(scope, receive, send)
            return
        if path in PRIVILEGED and not self._keys and (why := self._foreign_reason(headers)):
            await error_response(ApiError("permission_error", why))(scope, receive, send)
            return
        changes = scope["method"] not in _SAFE or path in self._paths.changing
        if changes and not self._keys and self._is_foreign(headers):
            origin = headers.get(b"origin", b"").decode("latin-1")[:200] or "another site"
            message = f"pages of {origin} may not change anything here: see --cors-origins and --api-key"
            await error_response(ApiError("permission_error", message), path)(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope["method"], send = "GET", _without_body(send)
        self.n_running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.n_running -= 1

    def _wrong_host(self, scope: Scope, headers: Headers, path: str) -> ApiError | None:
        """Return the error for a request whose Host does not name this server.

        A page can make its own name resolve to this machine's address (DNS rebinding). The browser then takes this
        server for the page's origin and CORS does not apply; only Host still holds the page's name. A key stops such a
        page, and browsers cannot reach a Unix socket.
        """
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            return ApiError("invalid_request_error", "the request has more than one Host header")
        host = headers.get(b"host", b"").decode("latin-1")[:200]
        if self._keys or not host or scope.get("client") is None or path in self._paths.guarded:
            return None
        if self._rules.allows_host(host):
            return None
        message = f"this server does not serve the host name {host!r} without a key: see --allowed-hosts and --api-key"
        return ApiError("permission_error", message)

    def _foreign_reason(self, headers: Headers) -> str:
        """Return why a keyless request is not from a local program or an allowed page; "" if it is."""
        if any(name in headers for name in _FORWARDED):
            return "requests through a proxy need a key: see --api-key"
        if self._is_foreign(headers):
            return "pages of other sites need a key: see --cors-origins and --api-key"
        return ""

    def _is_foreign(self, headers: Headers) -> bool:
        """Return True if the request comes from a browser page whose origin is not allowed.

        Browsers send Origin with every request that changes state, and Sec-Fetch-Site with every request. Pages can
        forge neither. Other programs send none of them.
        """
        origin = headers.get(b"origin", b"").decode("latin-1")
        site = headers.get(b"sec-fetch-site", b"")
        if self._rules.allows(origin) or site in (b"same-origin", b"same-site"):
            return False
        if not origin:
            return site == b"cross-site"
        hosts = (headers.get(b"host", b""), headers.get(b"x-forwarded-host", b""))
        return origin.partition("://")[2].lower() not in [host.decode("latin-1").lower() for host in hosts if host]


def is_local_request(scope: Scope) -> bool:
    """Return True if a local program sent the request, directly or through local proxies."""
    client = scope.get("client")
    addresses = [] if client is None else [client[0]]  # None: a Unix socket
    for name, value in scope["headers"]:
        if name == b"forwarded":
            return False
        if name in (b"x-forwarded-for", b"x-real-ip"):
            addresses += [part.strip() for part in value.decode("latin-1").split(",")]
    try:
        return all(ipaddress.ip_address(address).is_loopback for address in addresses)
    except ValueError:
        return False


def _without_body(send: Send) -> Send:
    """Wrap `send` for HEAD: end the response right after its headers, even if its body is an endless stream."""

    async def send_head(message: Any) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_head


def digest(key: bytes) -> bytes:
    """Return the hash that is stored for a key. Its fixed length hides the key's length from comparisons."""
    return blake2b(key, digest_size=32).digest()


def key_digests(headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """Return the hashes of the keys in `Authorization: Bearer` and `X-Api-Key`."""
    bearer = headers.get(b"authorization", b"")
    if bearer[:7].lower() == b"bearer ":
        bearer = bearer[7:]
    return digest(bearer), digest(headers.get(b"x-api-key", b""))


def key_is_valid(headers: Mapping[bytes, bytes], digests: tuple[bytes, ...]) -> bool:
    """Return True if `Authorization: Bearer` or `X-Api-Key` holds one of the keys, given by their hashes.

    The run time does not depend on the key, its length, or how much of it matches.
    """
    given = key_digests(headers)
    return max([hmac.compare_digest(one, key) for one in given for key in digests])


def busy_app(app: Callable[[], App], prefix: str, refused: Callable[[Scope, int], None]) -> App:
    """Return the application for connections over the limit: health probes pass, other requests get 503.

    `refused` is called with scope and status of each refused request.
    """
    paths = {prefix + path for path in HEALTH}

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in paths:
            await app()(scope, receive, send)
            return
        error = ApiError("unavailable_error", "too many connections", retry_after=1)
        refused(scope, error.status)
        await error_response(error, scope["path"].removeprefix(prefix), close=True)(scope, receive, send)

    return refuse
