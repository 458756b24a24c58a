"""The requests of resumable streams: the header that asks for one, and the fields that name one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.http.answer import Scope, json_response
from llamado.http.errors import OLLAMA, ApiError, invalid
from llamado.http.exchange import CONVERSATION
from llamado.http.json_body import read_json

STREAM, LOOKUP = "/v1/stream", "/v1/streams/lookup"
PATHS = frozenset({STREAM, LOOKUP})

RESUMABLE_POSTS = frozenset(
    {
        "/completion", "/completions", "/v1/completions", "/chat/completions", "/v1/chat/completions", "/responses",
        "/v1/responses", "/v1/messages", "/infill", "/api/chat", "/api/generate", "/audio/transcriptions",
        "/v1/audio/transcriptions", "/audio/translations", "/v1/audio/translations",
    }
)  # fmt: skip
"""Paths whose streams can be resumed."""

LONGEST_ID = 2048  # bytes
_OFFSET = re.compile(rb"\s*\+?(\d+)")  # `std::stoull` ignores what follows the digits
_LARGEST_OFFSET = 2**64 - 1


def requested_id(scope: Scope) -> bytes:
    """Return the conversation whose stream a request asks for; b"" if it asks for none. Raises ApiError."""
    if scope["method"] != "POST" or scope["path"] not in RESUMABLE_POSTS:
        return b""
    id: bytes = dict(scope["headers"]).get(CONVERSATION, b"")
    if len(id) > LONGEST_ID:
        raise invalid(f"X-Conversation-Id: at most {LONGEST_ID} bytes, got {len(id)}")
    return id


def is_streamed(fields: object, path: str) -> bool:
    """Return True if the fields of a body ask for a stream. Ollama's endpoints stream by default."""
    streamed = fields.get("stream", path in OLLAMA) if isinstance(fields, Mapping) else False
    return streamed is True or streamed == "true"  # "true": a form's field


def _query(request: Request) -> dict[bytes, bytes]:
    """Return the parameters of the query. Ids are compared as bytes, because headers have no encoding."""
    query = request.scope["query_string"].decode("latin-1")
    fields = parse_qsl(query, keep_blank_values=True, encoding="latin-1")
    return {name.encode("latin-1"): value.encode("latin-1") for name, value in fields}


def named_id(request: Request) -> bytes:
    """Return the conversation that the query names. Raises ApiError."""
    id = _query(request).get(b"conv_id", b"")
    if not id:
        raise invalid("Missing conversation id in path")
    return id


def offset(request: Request) -> int:
    """Return the byte at which the client wants the stream to begin. Raises ApiError."""
    text = _query(request).get(b"from", b"")
    if not text:
        return 0
    match = _OFFSET.match(text)
    if match is None or len(match[1]) > 20 or int(match[1]) > _LARGEST_OFFSET:
        raise invalid("Invalid 'from' offset")
    return int(match[1])


async def looked_up_ids(request: Request) -> list[bytes]:
    """Return the conversations that a lookup names, each once. Raises ApiError for a body that is not JSON."""
    body: Any = await read_json(request)
    ids = body.get("conversation_ids") if isinstance(body, dict) else None
    named = ids if isinstance(ids, list) else []
    return list(dict.fromkeys(id.encode() for id in named if isinstance(id, str) and id))


def invalid_lookup(error: ApiError) -> Response:
    """Return llama-server's response to a lookup whose body is not JSON. It has no code."""
    fields = {"message": f"invalid body: {error.message}", "type": error.type}
    return json_response(orjson.dumps({"error": fields}), 400)


def stopped_before_start() -> ApiError:
    """Return 400: another request stopped this one before its response began."""
    return invalid("request cancelled by a stop before its answer began")


def stopped() -> Response:
    """Return the response to DELETE, which also follows if there was no stream."""
    return Response(status_code=204, media_type="application/json")
