"""The ASGI application: routes, error bodies, and the door in front of them (keys, CORS, loading, sleep, records)."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamado import __version__
from llamado.errors import LlamadoError
from llamado.server.completions import Generator, completions_router
from llamado.server.embeddings import embeddings_router
from llamado.server.errors import ApiError, not_found, translate
from llamado.server.infill import infill_router
from llamado.server.lora import lora_router
from llamado.server.messages import messages_router
from llamado.server.monitor import health_body, monitor_router
from llamado.server.prompts import in_thread
from llamado.server.record import Record, current, request_id
from llamado.server.responses import responses_router
from llamado.server.sleep import QUIET
from llamado.server.slots import slots_router
from llamado.server.state import AccessRules, ServerState
from llamado.server.streaming import Mailbox, error_response, json_response
from llamado.server.text import text_router

log = logging.getLogger("llamado.server")

# Paths that need no key (`get_public_endpoints` in tools/server/server-http.cpp, b11434): the page of `--path` among
# them, so that a browser can show it and ask for the key.
HEALTH = frozenset({"/health", "/v1/health"})
PAGE = frozenset({"/", "/index.html"})
PUBLIC = HEALTH | PAGE

CLIENT_GONE = 499
"""Status in logs and metrics of a request whose client went away before its answer began (nginx's)."""

_OTHER = "other"  # endpoint, in metrics, of paths that do not exist


async def _answer_error(request: Request, error: Exception) -> Response:
    api = translate(error)
    if api.status == 500:
        log.error("%s %s", request.method, request.url.path, exc_info=error)
    return error_response(api)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    # The router's own errors are an unknown path and a wrong method; llama-server calls both 404.
    status = error.status_code if isinstance(error, HTTPException) else 404
    if status in (404, 405):
        return json_response(not_found().body, 404)
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return json_response(ApiError("invalid_request_error", str(detail), status=status).body, status)


class Door:
    """Checks every request before the routes see it, and notes what became of it."""

    def __init__(self, app: FastAPI, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = tuple(map(_digest, state.access.api_keys))
        self._prefix = state.switches.api_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = self._state
        headers = dict(scope["headers"])
        record = Record(request_id(headers.get(b"x-request-id", b"")), scope["method"], scope["path"])
        token = current.set(record)
        span = None if state.tracing is None else state.tracing.begin(record, headers)
        origin = allowed_origin(state.access, headers.get(b"origin", b"").decode("latin-1"))
        inner = {**scope}
        try:
            await self._answer(inner, headers, receive, _noting(send, record, origin.encode("latin-1")))
        except BaseException:
            record.status = record.status or 500
            raise
        finally:
            route = getattr(inner.get("route"), "path", "")
            self._note(record, inner["path"], route)
            if span is not None and state.tracing is not None:
                state.tracing.end(span, record, route, state.served.info.name if state.served else "")
            current.reset(token)

    async def _answer(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        if self._prefix:
            path = scope["path"]
            if not path.startswith(self._prefix + "/"):
                await json_response(not_found().body, 404)(scope, receive, send)
                return
            scope["path"] = path[len(self._prefix) :]
            scope["raw_path"] = scope.get("raw_path", path.encode())[len(self._prefix) :]
        refusal = self._refuse(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope["method"] = "GET"  # the server leaves the body out by itself
        sleep = self._state.sleep
        quiet = sleep is None or (scope["method"] == "GET" and scope["path"] in QUIET)
        if sleep is None or quiet or (sleep.asleep and not self._exists(scope)):
            await self._app(scope, receive, send)
            return
        try:
            async with sleep.awake():
                await self._app(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)

    def _exists(self, scope: Scope) -> bool:
        """Whether an endpoint takes the request; for anything else no model is woken."""
        routes = [route for route in self._app.router.routes if not isinstance(route, Mount)]
        return any(route.matches(scope)[0] is Match.FULL for route in routes)

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        access = self._state.access
        if scope["method"] == "OPTIONS":
            # Browsers send these without a key, before the request proper.
            cors = {
                "Access-Control-Allow-Credentials": "true" if access.cors_credentials else "false",
                "Access-Control-Allow-Methods": access.cors_methods,
                "Access-Control-Allow-Headers": access.cors_headers,
            }
            return Response(b"", headers=cors, media_type="text/html")
        if self._state.served is None and not (self._state.switches.static_path and scope["path"] in PAGE):
            status, body = health_body(self._state)
            return json_response(body, status)
        if self._keys and scope["path"] not in PUBLIC and not key_is_valid(headers, self._keys):
            error = ApiError("authentication_error", "Invalid API Key")
            return json_response(error.body, error.status)
        return None

    def _note(self, record: Record, path: str, route: str) -> None:
        seconds = time.perf_counter() - record.began
        if not record.status:
            record.status = CLIENT_GONE
        self._state.traffic.count(record.method, route or _OTHER, record.status, seconds)
        # Probes come every few seconds; what they hear is in the log already where it matters.
        level = logging.DEBUG if path in QUIET and record.status in (200, 503) else logging.INFO
        if log.isEnabledFor(level):
            tokens = f", {record.n_prompt}+{record.n_predicted} tokens" if record.n_prompt else ""
            fields = {
                "method": record.method,
                "path": record.path,
                "status": record.status,
                "duration_ms": round(seconds * 1e3, 3),
                "prompt_tokens": record.n_prompt,
                "predicted_tokens": record.n_predicted,
            }
            log.log(
                level,
                "%s %s %d, %.1f ms%s",
                record.method,
                _printable(record.path),
                record.status,
                seconds * 1e3,
                tokens,
                extra={"fields": fields},
            )


def _printable(path: str) -> str:
    """A path that cannot begin a line of its own or colour a terminal."""
    return path if path.isprintable() and len(path) <= 200 else repr(path[:200])


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=32).digest()


def key_is_valid(headers: dict[bytes, bytes], digests: tuple[bytes, ...]) -> bool:
    """Whether `Authorization: Bearer` or `X-Api-Key` holds one of the keys, given by their digests.

    The time it takes tells neither which key it is nor how long the keys are nor how much of one was right.
    """
    bearer = headers.get(b"authorization", b"")
    if bearer[:7].lower() == b"bearer ":
        bearer = bearer[7:]
    given = (_digest(bearer), _digest(headers.get(b"x-api-key", b"")))
    return max([hmac.compare_digest(one, digest) for one in given for digest in digests])


def allowed_origin(access: AccessRules, origin: str) -> str:
    """Value of Access-Control-Allow-Origin for a request's Origin; "" for none."""
    if access.cors_origins == "*":
        # With credentials a browser takes no "*": the origin is sent back instead.
        return origin if access.cors_credentials else "*"
    if access.cors_origins == "localhost":
        try:
            host = urlsplit(origin).hostname
        except ValueError:
            return ""
        return origin if host in ("localhost", "127.0.0.1", "::1") else ""
    origins = [o.strip() for o in access.cors_origins.split(",")]
    return origin if origin in origins else origins[0]


def _noting(send: Send, record: Record, origin: bytes) -> Send:
    """`send` that notes the status and adds the headers every answer has."""
    more = [(b"x-request-id", record.id.encode("ascii"))]
    if origin:
        more.append((b"access-control-allow-origin", origin))

    async def send_noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message["headers"] = [*message["headers"], *more]
        await send(message)

    return send_noting


def busy_app(app: Callable[[], ASGIApp], prefix: str) -> ASGIApp:
    """What answers where there are too many connections: `/health` by the application, 503 for the rest."""
    paths = {prefix + path for path in HEALTH}

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in paths:
            await app()(scope, receive, send)
            return
        error = ApiError("unavailable_error", "too many connections", retry_after=1)
        response = error_response(error)
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    return answer


def create_app(state: ServerState) -> ASGIApp:
    """The application for one server; call it inside the event loop that will run it."""
    app = FastAPI(title="llamado", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    generator = Generator(state, Mailbox(asyncio.get_running_loop()))
    app.include_router(monitor_router(state))
    app.include_router(completions_router(generator))
    app.include_router(text_router(generator))
    app.include_router(responses_router(generator))
    app.include_router(messages_router(generator))
    app.include_router(infill_router(generator))
    app.include_router(embeddings_router(state))
    app.include_router(slots_router(state))
    app.include_router(lora_router(state))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        # Putting the document together takes a while, the first time.
        return json_response(orjson.dumps(await in_thread(app.openapi)))

    if state.switches.static_path:
        # Behind all endpoints, so that no file can stand in for one.
        app.mount("/", StaticFiles(directory=state.switches.static_path, html=True))
    handlers: dict[type[Exception], Any] = {
        LlamadoError: _answer_error,
        HTTPException: _answer_http_error,
        Exception: _answer_error,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    return Door(app, state)
