"""The ASGI application: routes, error bodies, and the door in front of them (keys, CORS, loading)."""

from __future__ import annotations

import asyncio
import hmac
import logging
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
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
from llamado.server.responses import responses_router
from llamado.server.slots import slots_router
from llamado.server.state import AccessRules, ServerState
from llamado.server.streaming import Mailbox, error_response, json_response
from llamado.server.text import text_router

log = logging.getLogger("llamado.server")

# Paths that need no key (`get_public_endpoints` in tools/server/server-http.cpp, b11434).
PUBLIC = frozenset({"/health", "/v1/health"})


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
    """Checks every request before the routes see it."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        origin = allowed_origin(self._state.access, headers.get(b"origin", b"").decode("latin-1"))
        if origin:
            send = _with_origin(send, origin.encode("latin-1"))
        refusal = self._refuse(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server leaves the body out by itself
        await self._app(scope, receive, send)

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
        if self._state.served is None:
            status, body = health_body(self._state)
            return json_response(body, status)
        if access.api_keys and scope["path"] not in PUBLIC and not key_is_valid(headers, access.api_keys):
            error = ApiError("authentication_error", "Invalid API Key")
            return json_response(error.body, error.status)
        return None


def key_is_valid(headers: dict[bytes, bytes], keys: tuple[bytes, ...]) -> bool:
    """Whether `Authorization: Bearer` or `X-Api-Key` holds one of the keys; takes the same time whichever it is."""
    given = headers.get(b"authorization") or headers.get(b"x-api-key") or b""
    given = given.removeprefix(b"Bearer ")
    return max([hmac.compare_digest(given, key) for key in keys])


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


def _with_origin(send: Send, origin: bytes) -> Send:
    async def send_with_origin(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"access-control-allow-origin", origin)]
        await send(message)

    return send_with_origin


def create_app(state: ServerState) -> ASGIApp:
    """The application for one server; call it inside the event loop that will run it."""
    app = FastAPI(title="llamado", version=__version__, docs_url=None, redoc_url=None)
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
    app.add_exception_handler(LlamadoError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_error)
    return Door(app, state)
