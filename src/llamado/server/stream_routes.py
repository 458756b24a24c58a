"""`/v1/stream` and `/v1/streams/lookup`: send a resumable stream again, stop it, and find it."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.http.answer import json_response
from llamado.http.errors import ApiError, invalid, not_found
from llamado.http.resumable import requests
from llamado.http.resumable.recorder import ResumedStream
from llamado.http.resumable.registry import StreamRegistry
from llamado.server.api.routes import Routes

_ID = {"name": "conv_id", "in": "query", "required": True, "schema": {"type": "string"}}
_FROM = {"name": "from", "in": "query", "required": False, "schema": {"type": "integer", "minimum": 0}}
_IDS = {"type": "object", "properties": {"conversation_ids": {"type": "array", "items": {"type": "string"}}}}
_STATE = {
    "type": "object",
    "properties": {
        "conversation_id": {"type": "string"},
        "is_done": {"type": "boolean"},
        "total_bytes": {"type": "integer"},
        "started_at": {"type": "integer"},
        "completed_at": {"type": "integer"},
    },
}


def streams_router(streams: StreamRegistry) -> Routes:
    """Return the routes of resumable streams."""
    router = Routes("streams")
    invalid_query = {400: {"description": "no conversation, or no such offset"}}

    async def resume_stream(request: Request) -> Response:
        stream = streams.find(requests.named_id(request))
        if stream is None:
            raise not_found()
        offset = requests.offset(request)
        if offset < stream.first:
            raise invalid("Stream offset lost, please restart")
        return ResumedStream(streams, stream, offset)

    async def stop_stream(request: Request) -> Response:
        streams.stop(requests.named_id(request))
        return requests.stopped()

    async def look_up_streams(request: Request) -> Response:
        try:
            ids = await requests.looked_up_ids(request)
        except ApiError as error:
            return requests.invalid_lookup(error)
        return json_response(orjson.dumps(streams.look_up(ids)))

    events = {200: {"description": "the stream", "content": {"text/event-stream": {"schema": {"type": "string"}}}}}
    router.add(
        "GET",
        requests.STREAM,
        resume_stream,
        responses=events | invalid_query | {404: {"description": "no such stream"}},
        operation={"parameters": [_ID, _FROM]},
    )
    router.add(
        "DELETE",
        requests.STREAM,
        stop_stream,
        responses={204: {"description": "there is no such stream any more"}} | invalid_query,
        operation={"parameters": [_ID]},
    )
    found = {"description": "streams", "content": {"application/json": {"schema": {"type": "array", "items": _STATE}}}}
    router.add(
        "POST",
        requests.LOOKUP,
        look_up_streams,
        responses={200: found, 400: {"description": "not JSON"}},
        operation={"requestBody": {"required": True, "content": {"application/json": {"schema": _IDS}}}},
    )
    return router
