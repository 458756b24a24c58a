"""The ASGI application: routes, error bodies, and the layers before them (keys, CORS, loading, sleep, records)."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Mount
from starlette.types import Message, Receive, Scope, Send

from llamado import __version__
from llamado.errors import LlamadoError
from llamado.http.access import HEALTH, PRIVILEGED, Access, AccessPaths
from llamado.http.answer import end_if_cancelled, error_response, json_response
from llamado.http.bodies import MAX_BODY, MAX_MEDIA_BODY
from llamado.http.errors import ANTHROPIC, OLLAMA, anthropic_error
from llamado.http.monitoring.counter import CLIENT_GONE, OTHER
from llamado.http.monitoring.metrics import USAGE_HEADER, is_usage_id
from llamado.http.monitoring.request_log import Record, current, request_id
from llamado.http.resumable.recorder import RecordedRequests
from llamado.http.resumable.requests import PATHS as STREAM_PATHS
from llamado.page.chats_api import CHATS, is_chats_path
from llamado.page.files import START_PATHS, page_paths, page_routes
from llamado.server.api.anthropic import messages_router
from llamado.server.api.audio.transcriptions import transcriptions_router
from llamado.server.api.cluster.cluster_routes import MEMBER_PATHS, cluster_router
from llamado.server.api.cluster.lab_routes import lab_router
from llamado.server.api.completions import completions_router
from llamado.server.api.embeddings import embeddings_router
from llamado.server.api.infill import infill_router
from llamado.server.api.live import live_router
from llamado.server.api.lora import lora_router
from llamado.server.api.ollama.routes import ollama_router
from llamado.server.api.predict import predict_router
from llamado.server.api.responses import responses_router
from llamado.server.api.routes import Routes, document
from llamado.server.api.slots import slots_router
from llamado.server.api.status import health_body, monitor_router
from llamado.server.api.tokenize import text_router
from llamado.server.chat_routes import chats_router
from llamado.server.errors import ApiError, not_found, translate
from llamado.server.generate.generator import Generator
from llamado.server.generate.streaming import Mailbox
from llamado.server.ops.sleep import QUIET
from llamado.server.state import ServerState
from llamado.server.stream_routes import streams_router
from llamado.server.tool_routes import tools_router

log = logging.getLogger("llamado.server")


_LONGEST_PATH = _LONGEST_REASON = 300  # characters of a log line

# Endpoints that probes, dashboards and `llamado top` poll every few seconds; successful requests are logged as DEBUG.
_POLLED = QUIET | {"/slots", CHATS}


async def _answer_error(request: Request, error: Exception) -> Response:
    api = translate(error)
    if api.status == 500:
        log.error("%s %s", request.method, request.url.path, exc_info=error)
    return error_response(api, request.scope["path"])


async def _answer_http_error(request: Request, error: Exception) -> Response:
    # Starlette's own errors are an unknown path (404) and a wrong method (405); llama-server answers both with 404.
    status = error.status_code if isinstance(error, HTTPException) else 404
    if status in (404, 405):
        return error_response(not_found(), request.scope["path"])
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return error_response(ApiError("invalid_request_error", str(detail), status=status), request.scope["path"])


class ServerApp:
    """The layers around the routes: access rules, waking the model, and the record of each request."""

    def __init__(self, app: Starlette, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._prefix = state.switches.api_prefix
        # Paths without a key (`get_public_endpoints` in tools/server/server-http.cpp, b11434). The page is one of them:
        # it asks for the key.
        switches = state.switches
        wanted = switches.predict
        self._probes = HEALTH if wanted is None else HEALTH | {wanted.health}
        self._page = frozenset(START_PATHS if switches.static_path else page_paths() if switches.page else ())
        public = HEALTH | MEMBER_PATHS | frozenset(START_PATHS) | self._page
        guarded = frozenset() if switches.cluster_token is None else MEMBER_PATHS
        self._recorded = RecordedRequests(self._awake, state.streams)
        self.access = Access(
            self._until_shutdown,
            state.access,
            self._prefix,
            AccessPaths(public=public, guarded=guarded),
            unready=self._unready,
            max_body=self._max_body,
        )
        self.access.on_drain = state.streams.close

    def _max_body(self) -> int:
        served = self._state.served
        return MAX_MEDIA_BODY if served is not None and served.media_kinds else MAX_BODY

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = self._state
        headers = dict(scope["headers"])
        record = Record(request_id(headers.get(b"x-request-id", b"")), scope["method"], scope["path"])
        record.client = scope["client"][0] if scope.get("client") else _forwarded_client(headers)
        token = current.set(record)
        usage_id = headers.get(USAGE_HEADER, b"").decode("latin-1")
        if is_usage_id(usage_id):
            state.usage.begin(usage_id)
        number = state.live.requests.begin(record)
        span = None if state.tracing is None else state.tracing.begin(record, headers)
        try:
            await self.access(scope, receive, _recorded(send, record))
        except BaseException:
            record.status = record.status or 500
            raise
        finally:
            self._finish(record, number)
            failed = record.status >= 400 and record.status != CLIENT_GONE
            state.usage.end(usage_id, 0 if failed else record.used_tokens)
            if span is not None and state.tracing is not None:
                state.tracing.end(span, record, record.route, state.served.info.name if state.served else "")
            current.reset(token)

    async def _until_shutdown(self, scope: Scope, receive: Receive, send: Send) -> None:
        await end_if_cancelled(self._recorded, scope, receive, send, lambda: self.access.draining)

    async def _awake(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the routes; first wake the model if the endpoint needs it."""
        try:
            sleep = self._state.sleep
            path = scope["path"]
            quiet = path in (QUIET | self._page if scope["method"] == "GET" else MEMBER_PATHS) | PRIVILEGED
            quiet = quiet or path.startswith("/v1/models/") or is_chats_path(path) or path in STREAM_PATHS
            if sleep is None or quiet or (sleep.asleep and not self._endpoint(scope["method"], path)):
                await self._app(scope, receive, send)
                return
            try:
                async with sleep.awake():
                    await self._app(scope, receive, send)
            except ApiError as error:
                await error_response(error, scope["path"])(scope, receive, send)
        finally:
            record = current.get()
            if record is not None:
                record.route = getattr(scope.get("route"), "path", "")

    def _unready(self, path: str) -> tuple[int, bytes] | None:
        """Return status and body for a path that is not available while the model is loading, else None."""
        if self._state.served is not None or path in self._page or path == "/metrics" or is_chats_path(path):
            return None
        status, body = health_body(self._state)
        if path in OLLAMA:
            body = orjson.dumps({"error": reason_of(body)})
        elif path in ANTHROPIC:
            fields = orjson.loads(body)
            body = orjson.dumps(fields | anthropic_error(ApiError("unavailable_error", fields["error"]["message"])))
        return status, body

    def refused(self, scope: Scope, status: int) -> None:
        """Count a request that the connection limits refused before it reached the application."""
        self._count(scope["method"], scope["path"], "", status, 0.0)

    def _count(
        self, method: str, path: str, route: str, status: int, seconds: float, *, cancelled: bool = False
    ) -> None:
        """Count a request under its endpoint, also if it was refused before it reached the endpoint."""
        path = path.removeprefix(self._prefix)
        endpoint = route or self._endpoint("GET" if method == "HEAD" else method, path) or OTHER
        probe = path in self._probes
        self._state.traffic.count(method, endpoint, status, seconds, cancelled=cancelled, probe=probe)

    def _endpoint(self, method: str, path: str) -> str:
        """Return the path of the endpoint that takes a request; "" if none does."""
        scope = {"type": "http", "method": method, "path": path, "root_path": ""}
        for route in self._app.router.routes:
            if not isinstance(route, Mount) and route.matches(scope)[0] is Match.FULL:
                return str(getattr(route, "path", ""))
        return ""

    def _finish(self, record: Record, number: int) -> None:
        """Count and log a request that ended."""
        seconds = time.perf_counter() - record.began
        if not record.status:
            record.status = CLIENT_GONE
        cancelled = record.was_cancelled or record.status == CLIENT_GONE
        self._count(record.method, record.path, record.route, record.status, seconds, cancelled=cancelled)
        model = self._state.served.info.name if self._state.served else ""
        self._state.live.requests.end(number, record, model, cancelled=cancelled)
        is_poll = record.method in ("GET", "HEAD") and record.path.removeprefix(self._prefix) in _POLLED
        level = logging.DEBUG if is_poll and record.status in (200, 503) else logging.INFO
        if not log.isEnabledFor(level):
            return
        first = None if record.first_token is None else record.first_token - record.began
        fields: dict[str, Any] = {
            "client": record.client,
            "method": record.method,
            "path": record.path,
            "status": record.status,
            "duration_ms": round(seconds * 1e3, 3),
            "model": model,
            "prompt_tokens": record.n_prompt,
            "cached_tokens": record.n_cached,
            "predicted_tokens": record.n_predicted,
        }
        parts = [f"{seconds * 1e3:.1f} ms"]
        if record.n_prompt:
            cached = f" ({record.n_cached} cached)" if record.n_cached else ""
            parts.append(f"{model}: {record.n_prompt}{cached} + {record.n_predicted} tokens")
        if first is not None:
            fields["first_token_ms"] = round(first * 1e3, 3)
            parts.append(f"first after {first * 1e3:.1f} ms")
        if record.tokens_per_second:
            fields["tokens_per_second"] = round(record.tokens_per_second, 3)
            parts.append(f"{record.tokens_per_second:.1f} tokens/s")
        if cancelled:
            fields["cancelled"] = True
            parts.append("cancelled: its client went away")
        if record.reason:
            fields["reason"] = record.reason
            parts.append(record.reason)
        path = record.path[:_LONGEST_PATH]
        client = f"{record.client} " if record.client else ""
        line = f"{client}{record.method} {path} {record.status}, {', '.join(parts)}"
        log.log(level, "%s", line, extra={"fields": fields})


def _forwarded_client(headers: dict[bytes, bytes]) -> str:
    """Return the client of the router or proxy in front of this server, or "".

    Called for connections over a Unix socket, where only programs of this machine can set the header.
    """
    peer = headers.get(b"x-forwarded-for", b"").rpartition(b",")[2].strip().decode("latin-1")
    try:
        return str(ipaddress.ip_address(peer))
    except ValueError:
        return ""


def _recorded(send: Send, record: Record) -> Send:
    """Wrap `send` to record status and error message, and to add the request's id to the response headers."""
    id = (b"x-request-id", record.id.encode("ascii"))

    async def send_recorded(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message["headers"] = [*message["headers"], id]
        elif record.status >= 400 and not record.reason:
            record.reason = reason_of(message.get("body", b""))[:_LONGEST_REASON]
        await send(message)

    return send_recorded


def reason_of(body: bytes) -> str:
    """Return the message of an error body in the form of any API, or "" for another body."""
    try:
        fields = orjson.loads(body)
        error = fields.get("error", fields)  # `/tools` has no object around it
        return error if isinstance(error, str) else str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def create_app(state: ServerState) -> ServerApp:
    """Return the application of one server; call it inside the event loop that will run it."""
    handlers: dict[Any, Any] = {
        LlamadoError: _answer_error,
        HTTPException: _answer_http_error,
        Exception: _answer_error,
    }
    app = Starlette(exception_handlers=handlers)
    app.router.redirect_slashes = False
    generator = Generator(state, Mailbox(asyncio.get_running_loop()))
    routers = [
        monitor_router(state),
        completions_router(generator),
        transcriptions_router(generator),
        text_router(generator),
        responses_router(generator),
        messages_router(generator),
        ollama_router(generator, state),
        infill_router(generator),
        embeddings_router(state),
        slots_router(state),
        lora_router(state),
        streams_router(state.streams),
        cluster_router(state),
        live_router(state),
        lab_router(state),
    ]
    if (wanted := state.switches.predict) is not None:
        paths = sorted(route.path for router in routers for route in router.routes if route.method == "POST")
        routers.append(predict_router(app, wanted.predict, [*reversed(paths)]))  # `/v1/…` before the same without
    # After `predict`, which offers only endpoints of the model.
    routers += [tools_router(state), chats_router(state)]
    about = Routes("about")

    @about.get("/openapi.json", hidden=True)
    async def openapi(_: Request) -> Response:
        return json_response(orjson.dumps(document(routers, "llamado", __version__)))

    for router in [*routers, about]:
        app.router.routes += router.routes
    if state.switches.static_path:
        from starlette.staticfiles import StaticFiles

        # After all endpoints, so that no file can replace one.
        app.mount("/", StaticFiles(directory=state.switches.static_path, html=True))
    elif state.switches.page:
        app.router.routes += page_routes()
    found = ServerApp(app, state)
    state.ending = lambda: found.access.draining
    return found
