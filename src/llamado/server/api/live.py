"""`GET /live/events`: a stream of slots, requests, rates of the last hour, caches and the log.

`GET /live/requests` returns only counts. Everything comes from snapshots, as in `/metrics`, and has no text of prompts
or answers.
"""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.engine.media.spans import text_tokens
from llamado.engine.request import EngineSnapshot, SlotSnapshot
from llamado.http.answer import json_response
from llamado.server.api.routes import Routes
from llamado.server.live.stream import LiveStream, polled
from llamado.server.state import ServerState

_EVENTS = {200: {"description": "all there is, then what changes", "content": {"text/event-stream": {"schema": {}}}}}
_ENTRIES = {200: {"description": "what the prompt cache holds", "content": {"application/json": {"schema": {}}}}}
_REQUESTS = {200: {"description": "counts of requests", "content": {"application/json": {"schema": {}}}}}


def live_router(state: ServerState) -> Routes:
    """Return the routes of the page's live view."""
    router = Routes("live")

    @router.get("/live/events", responses=_EVENTS)
    async def live_events(_: Request) -> Response:
        state.loaded()
        return LiveStream(polled(ServerSource(state).read, state.ending), state.ending)

    @router.get("/live/requests", responses=_REQUESTS)
    async def live_requests(_: Request) -> Response:
        snapshot = state.loaded().snapshot()
        counts = {"running": snapshot.requests_processing, "waiting": snapshot.requests_deferred}
        return json_response(orjson.dumps(counts | _counts(state)))

    @router.get("/live/cache", responses=_ENTRIES)
    async def live_cache(_: Request) -> Response:
        served = state.loaded()
        entries: list[dict[str, Any]] = []
        for one in served.snapshot().stored:
            entries.append({"tokens": one.n_tokens, "bytes": one.n_bytes, "used": round(one.used, 3)})
            if state.switches.slots:  # without /slots, which shows prompts, no text is shown here either
                entries[-1]["text"] = served.tokenizer.decode(text_tokens(one.begins), special=True)
        return json_response(orjson.dumps({"entries": entries}))

    return router


def _counts(state: ServerState) -> dict[str, int]:
    """Return the numbers of requests since the start: ended, failed, and cancelled by their clients."""
    requests = state.live.requests
    return {"ended": requests.n_ended, "errors": requests.n_errors, "cancelled": state.traffic.cancelled}


class ServerSource:
    """The changes of a server since the last read, for one listener."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._sent: dict[str, Any] = {}
        self._n_samples = self._n_ended = self._n_lines = 0

    def read(self) -> dict[str, Any]:
        """Return the fields that changed since the last call. `samples`, `ended` and `log` have only new entries."""
        state, live = self._state, self._state.live
        served = state.loaded()
        snapshot = served.snapshot()
        now: dict[str, Any] = {
            "model": served.info.name,
            "asleep": state.sleep is not None and state.sleep.asleep,
            "waiting": snapshot.requests_deferred,
            "slots": [_slot_json(slot) for slot in snapshot.slots],
            "running": live.requests.running(snapshot.slots),
            "cells": {
                "used": snapshot.kv_cells_used,
                "total": snapshot.kv_cells_total,
                "shared": snapshot.kv_cells_shared,
            },
            "cache": _cache_json(snapshot),
            "counts": _counts(state),
        }
        found = {name: value for name, value in now.items() if self._sent.get(name) != value}
        if not self._sent:
            found["first"] = True
        self._sent = now
        if live.samples.n > self._n_samples:
            found["samples"] = live.samples.since(self._n_samples)
            self._n_samples = live.samples.n
        if live.requests.n_ended > self._n_ended:
            found["ended"] = live.requests.ended(self._n_ended)
            self._n_ended = live.requests.n_ended
        self._n_lines, lines = live.log.since(self._n_lines)
        if lines:
            found["log"] = [line.as_json() for line in lines]
        if found:
            found["at"] = round(time.time(), 3)
        return found


def _slot_json(slot: SlotSnapshot) -> dict[str, Any]:
    """Return a slot as JSON.

    `used`: tokens in its cells; `computed` and `cached`: tokens of its prompt; `left`: tokens to generate, -1 without a
    limit.
    """
    return {
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "busy": slot.is_processing,
        "task": slot.id_task,
        "used": slot.n_prompt_tokens,
        "prompt": 0 if slot.request is None else len(slot.request.prompt),
        "computed": slot.n_prompt_tokens_processed,
        "cached": slot.n_prompt_tokens_cache,
        "predicted": slot.n_decoded,
        "left": slot.n_remain,
    }


def _cache_json(snapshot: EngineSnapshot) -> dict[str, Any]:
    """Return the prompts stored in memory and on disk, and the numbers of reused and computed prompt tokens."""
    counters, disk = snapshot.counters, snapshot.disk
    found: dict[str, Any] = {
        "prompts": snapshot.n_stored_prompts,
        "tokens": snapshot.n_stored_tokens,
        "bytes": snapshot.stored_prompt_bytes,
        "hit_tokens": counters.prompt_tokens_cached_total,
        "computed_tokens": counters.prompt_tokens_total,
    }
    if disk is not None:
        found["disk"] = {"files": disk.files, "bytes": disk.bytes, "hits": disk.hits, "tokens_read": disk.tokens_read}
    return found
