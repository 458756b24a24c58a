"""Access control of server and router: the prefix of all paths, origins, keys, HEAD, the end of the process."""

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
from llamado.http.bodies import Bodies, Body
from llamado.http.errors import ApiError, not_found

LIVE = frozenset({"/livez", "/healthz"})
"""Paths that tell whether the process works, whatever it waits for; they are answered also while it loads or ends."""
HEALTH = LIVE | {"/health", "/v1/health", "/readyz"}
"""Paths that never need a key."""
OWN = frozenset({"/tools", "/cors-proxy"})
"""Paths that act in the name of this machine's user: without a key only its own programs and pages get there."""

Headers = dict[bytes, bytes]

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})  # RFC 9110, 9.2.1, without TRACE, which nothing here answers
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")  # what proxies say of who asked them
_DRAIN_SECONDS = 5
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s\[\]:/?#@\\]*))(?::[0-9]*)?")
"""Name and port (RFC 9110, 7.2), and nothing besides."""


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """Who may call: keys, and what browsers are told."""

    api_keys: tuple[bytes, ...] = ()
    cors_origins: str = "localhost"
    """`*`, `localhost`, or origins separated by commas."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in `Host` that are served without a key: `name`, `.suffix` for a domain and its subdomains, `*` for all."""
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True

    def allows(self, origin: str) -> bool:
        """Whether pages of an origin may call."""
        if self.cors_origins == "*":
            return True
        if self.cors_origins == "localhost":
            return _is_local(origin)
        return origin in self._origins

    def shown_origin(self, origin: str) -> str:
        """Value of Access-Control-Allow-Origin for a request's Origin; "" for none."""
        if self.cors_origins == "*":
            # With credentials a browser takes no "*": the origin is sent back instead.
            return origin if self.cors_credentials else "*"
        if self.cors_origins == "localhost":
            return origin if _is_local(origin) else ""
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


class Access:
    """Checks every request before `app` sees it.

    `public`: paths that need no key. `guarded`: paths that check a secret of their own, so that any Host may name them.
    `changing`: paths that change something though they are asked for by GET.
    `unready`: status and body of what is answered instead, for a path; None: the application answers.
    """

    def __init__(
        self,
        app: App,
        rules: AccessRules,
        prefix: str = "",
        *,
        public: frozenset[str] = HEALTH,
        guarded: frozenset[str] = frozenset(),
        changing: frozenset[str] = frozenset(),
        unready: Callable[[str], tuple[int, bytes] | None] = lambda path: None,
    ) -> None:
        self._app = app
        self._rules = rules
        self._prefix = prefix
        self._public = public
        self._guarded = guarded
        self._changing = changing
        self._unready = unready
        self._keys = tuple(map(digest, rules.api_keys))
        self._preflight = [
            (b"access-control-allow-credentials", b"true" if rules.cors_credentials else b"false"),
            (b"access-control-allow-methods", rules.cors_methods.encode("latin-1")),
            (b"access-control-allow-headers", rules.cors_headers.encode("latin-1")),
            (b"content-type", b"text/html"),
        ]
        self.bodies = Bodies()
        self.draining = False
        """Whether the process finishes what it has and takes nothing new."""
        self.n_running = 0
        """Requests that the application is answering."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = Body(self.bodies)
        try:
            await self._answer({**scope, "llamado.body": body}, receive, self._sending(scope, body, send))
        finally:
            body.release()

    def _sending(self, scope: Scope, body: Body, send: Send) -> Send:
        """`send` that adds who may read the answer, and lets go of the request's body when the answer begins."""
        origin = self._rules.shown_origin(dict(scope["headers"]).get(b"origin", b"").decode("latin-1"))
        more = [(b"access-control-allow-origin", origin.encode("latin-1"))] if origin else []

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                body.release()
                message["headers"] = [*message["headers"], *more]
            await send(message)

        return sending

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
            # Browsers send these without a key, before the request proper.
            await answer(send, b"", 200, self._preflight)
            return
        live = path in LIVE
        unready = None if live else self._unready(path)
        if unready is not None:
            await answer(send, unready[1], unready[0])
            return
        if self.draining and not live:
            error = ApiError("unavailable_error", "the server is ending", retry_after=_DRAIN_SECONDS)
            await error_response(error, path, close=True)(scope, receive, send)
            return
        if self._keys and path not in self._public and not key_is_valid(headers, self._keys):
            await error_response(ApiError("authentication_error", "Invalid API Key"), path)(scope, receive, send)
            return
        if path in OWN and not self._keys and (why := self._stranger(headers)):
            await error_response(ApiError("permission_error", why))(scope, receive, send)
            return
        changes = scope["method"] not in _SAFE or path in self._changing
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

        A page can make its own name resolve to this machine's address (DNS rebinding). Its browser then takes this
        server for the page's origin, so CORS does not apply; only Host still holds the page's name. A key stops such a
        page, and no browser reaches a Unix socket.
        """
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            return ApiError("invalid_request_error", "the request has more than one Host header")
        host = headers.get(b"host", b"").decode("latin-1")[:200]
        if self._keys or not host or scope.get("client") is None or path in self._guarded:
            return None
        if self._rules.allows_host(host):
            return None
        message = f"this server does not serve the host name {host!r} without a key: see --allowed-hosts and --api-key"
        return ApiError("permission_error", message)

    def _stranger(self, headers: Headers) -> str:
        """Return why a request without a key comes from no program or page of this machine; "" if it may."""
        if any(name in headers for name in _FORWARDED):
            return "requests that a proxy passes on need a key: see --api-key"
        if self._is_foreign(headers):
            return "pages of other sites need a key: see --cors-origins and --api-key"
        return ""

    def _is_foreign(self, headers: Headers) -> bool:
        """Whether a page of a site that is not allowed makes its reader's browser ask.

        Browsers send an Origin with all that changes something, and Sec-Fetch-Site with everything; pages can forge
        neither. Other programs send none of them.
        """
        origin = headers.get(b"origin", b"").decode("latin-1")
        site = headers.get(b"sec-fetch-site", b"")
        if self._rules.allows(origin) or site in (b"same-origin", b"same-site"):
            return False
        if not origin:
            return site == b"cross-site"
        hosts = (headers.get(b"host", b""), headers.get(b"x-forwarded-host", b""))
        return origin.partition("://")[2].lower() not in [host.decode("latin-1").lower() for host in hosts if host]


def comes_from_this_machine(scope: Scope) -> bool:
    """Return True if a program of this machine sent a request, directly or through proxies of this machine."""
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
    """`send` for HEAD: the answer ends with its headers, also that of a stream without end."""
    ended = False

    async def sending(message: Any) -> None:
        nonlocal ended
        if message["type"] == "http.response.start":
            await send(message)
        elif not ended:
            ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return sending


def digest(key: bytes) -> bytes:
    """What is kept of a key, so that comparing tells nothing of its length."""
    return blake2b(key, digest_size=32).digest()


def digests_given(headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """The digests of what `Authorization: Bearer` and `X-Api-Key` hold."""
    bearer = headers.get(b"authorization", b"")
    if bearer[:7].lower() == b"bearer ":
        bearer = bearer[7:]
    return digest(bearer), digest(headers.get(b"x-api-key", b""))


def key_is_valid(headers: Mapping[bytes, bytes], digests: tuple[bytes, ...]) -> bool:
    """Whether `Authorization: Bearer` or `X-Api-Key` holds one of the keys, given by their digests.

    The time it takes tells neither which key it is nor how long the keys are nor how much of one was right.
    """
    given = digests_given(headers)
    return max([hmac.compare_digest(one, key) for one in given for key in digests])


def busy_app(app: Callable[[], App], prefix: str, refused: Callable[[Scope, int], None]) -> App:
    """Return the application for connections over the limit: probes pass, all else is 503.

    `refused` is called with the scope and status of each refused request.
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
