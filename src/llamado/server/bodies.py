"""Request bodies: bounded, and JSON or a 400 that says where it is not."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from llamado.server.errors import ApiError, invalid

# A 128k-token prompt is under 1 MB of text, 5 MB as JSON numbers; parsing this much stays within the event loop's
# patience.
MAX_BODY = 16 * 2**20
# Arrays and objects inside of each other; schemas of tools nest a few dozen. What walks a body by recursion relies on
# this.
MAX_DEPTH = 200
# Brackets in all. Each array or object takes 56 bytes and more, so a body of nothing else would take 20 times its size.
MAX_BRACKETS = 500_000


async def read_body(request: Request) -> bytes:
    """The whole body. Raises ApiError (413) when it is larger than MAX_BODY."""
    too_large = ApiError("invalid_request_error", f"request body exceeds {MAX_BODY} bytes", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_BODY:
                raise too_large
            chunks.append(chunk)
    except ClientDisconnect:
        raise invalid("the client went away while sending its body") from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def parse_json(body: bytes) -> Any:
    """A body as JSON. Raises ApiError where it is none, or deeper or more split up than anything real."""
    if not body:
        raise invalid("parse error at line 1, column 1: attempting to parse an empty input")
    n_brackets = body.count(b"[") + body.count(b"{")
    if n_brackets > MAX_BRACKETS:
        raise invalid(f"the request body has more than {MAX_BRACKETS} arrays and objects")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"parse error at line {error.lineno}, column {error.colno}: {error.msg}") from None
    if n_brackets > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise invalid(f"the request body is nested more than {MAX_DEPTH} levels deep")
    return value


def is_deeper(value: Any, levels: int) -> bool:
    """Whether arrays and objects are nested more than `levels` deep; without recursion."""
    level = [value]
    for _ in range(levels + 1):
        level = [v for v in level if type(v) is list or type(v) is dict]
        if not level:
            return False
        level = [inner for v in level for inner in (v.values() if type(v) is dict else v)]
    return True


async def read_json(request: Request) -> Any:
    """The body as JSON. Raises ApiError."""
    return parse_json(await read_body(request))


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object; null and an empty array count as an empty one. Raises ApiError."""
    value = await read_json(request)
    if value is None or value == []:
        return {}
    if not isinstance(value, dict):
        raise invalid("the request body must be a JSON object")
    return value
