"""Read-only endpoints: health, slots, properties, models, metrics. All answer from snapshots."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from llamado.build import BUILD
from llamado.engine.request import Away, GenerationParams, SlotSnapshot
from llamado.http.answer import json_response
from llamado.http.monitoring.metrics import USAGE_PATH, is_usage_id
from llamado.media.media import MediaKind
from llamado.server.api.routes import Routes
from llamado.server.errors import RETRY_AFTER, ApiError, invalid, loading, not_supported
from llamado.server.generate.generation_settings import generation_settings
from llamado.server.generate.request import GenerationRequest
from llamado.server.model import ServedModel
from llamado.server.state import ServerState

_HEALTHY = b'{"status":"ok"}'

_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_TEXTS = {"type": "array", "items": _TEXT}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "type"],
            "properties": {"code": _NUMBER, "message": _TEXT, "type": _TEXT},
        },
        "progress": {"type": "number", "minimum": 0, "maximum": 1},
        "stage": _TEXT,
        "model": _TEXT,
    },
}


def _object(required: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **more}}


def _answers(schema: Mapping[str, Any], *errors: int, busy: Mapping[str, Any] | None = None) -> dict[int | str, Any]:
    """Return OpenAPI descriptions of an endpoint's answers: 200, its errors, and 503 while the model is loading."""
    failed: dict[int | str, Any] = {status: {"description": "error", **_json(_ERROR)} for status in errors}
    unavailable = _ERROR if busy is None else {"anyOf": [_ERROR, busy]}
    return {
        200: {"description": "done", **_json(schema)},
        **failed,
        503: {"description": "unavailable", **_json(unavailable)},
    }


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _query(*names: str) -> dict[str, Any]:
    return {"parameters": [{"name": n, "in": "query", "required": False, "schema": _TEXT} for n in names]}


_AWAY = _object(
    {"device": _TEXT, "since": {"type": "number"}, "why": _TEXT, "layers": _TEXT, "now": {"type": "object"}}
)
_DEGRADED = {"type": "array", "items": _AWAY}
_BUSY = _object({"status": _TEXT}, slots_idle=_NUMBER, slots_processing=_NUMBER, degraded=_DEGRADED)
_HEALTH = _answers(_BUSY, busy=_BUSY)
_MODEL = _object(
    {"id": _TEXT, "object": {"const": "model"}, "created": _NUMBER, "owned_by": _TEXT, "meta": {"type": "object"}},
    aliases=_TEXTS,
    tags=_TEXTS,
)
_MODELS = _answers(
    _object(
        {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}},
        models={"type": "array", "items": _object({"name": _TEXT, "model": _TEXT})},
    )
)
_PROPS = _answers(
    _object(
        {
            "default_generation_settings": _object({"params": {"type": "object"}, "n_ctx": _NUMBER}),
            "total_slots": _NUMBER,
            "model_path": _TEXT,
            "chat_template": _TEXT,
            "chat_template_caps": {"type": "object"},
            "build_info": _TEXT,
            "is_sleeping": _FLAG,
        }
    )
)
_LIVE: dict[int | str, Any] = {200: _answers(_BUSY)[200], 503: {"description": "the engine hangs", **_json(_ERROR)}}
_CHANGED = _answers(_object({"success": _FLAG}), 501)
_USAGE = _answers(_object({"total_tokens": _NUMBER}), 400, 404)
_SLOT = _object({"id": _NUMBER, "n_ctx": _NUMBER, "speculative": _FLAG, "is_processing": _FLAG})
_SLOTS = _answers({"type": "array", "items": _SLOT}, 501)
_METRICS: dict[int | str, Any] = {
    **_answers({}, 501),
    200: {"description": "Prometheus text", "content": {"text/plain": {"schema": _TEXT}}},
}


def model_json(served: ServedModel) -> dict[str, Any]:
    """Return the model as an entry of `/v1/models`."""
    info, kinds = served.info, served.media_kinds
    modalities = ["text", *(kind.value for kind in MediaKind if kind in kinds)]
    return {
        "id": info.name,
        "aliases": list(info.aliases),
        "tags": list(info.tags),
        "object": "model",
        "architecture": {"input_modalities": modalities, "output_modalities": ["text"]},
        "created": int(time.time()),
        "owned_by": "llamado",
        "meta": {
            "vocab_type": info.vocab_type,
            "n_vocab": info.n_vocab,
            "n_ctx": info.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_embd": info.n_embd,
            "n_params": info.n_params,
            "size": info.size,
            "ftype": info.ftype,
        },
    }


def models_json(served: ServedModel) -> dict[str, Any]:
    """Return the body of `/v1/models`, in OpenAI's form and, under `models`, in Ollama's."""
    info = served.info
    ollama = {
        "name": info.name,
        "model": info.name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion", "multimodal"] if served.media_kinds else ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [""],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
    return {"models": [ollama], "object": "list", "data": [model_json(served)]}


def props_json(served: ServedModel, state: ServerState) -> dict[str, Any]:
    """Return the body of `/props`."""
    info, switches = served.info, state.switches
    sampling = served.defaults.sampling
    defaults = GenerationRequest(params=GenerationParams(sampling=sampling))
    return {
        "default_generation_settings": {
            "params": generation_settings(defaults, seed=sampling.seed, brief=True),
            "n_ctx": info.n_ctx,
        },
        "total_slots": served.n_slots,
        "model_alias": info.name,
        "model_ftype": info.ftype,
        "model_path": info.path,
        "modalities": {
            "vision": MediaKind.IMAGE in served.media_kinds,
            "video": False,
            "audio": MediaKind.AUDIO in served.media_kinds,
        },
        "media_marker": served.media_marker,
        "endpoint_slots": switches.slots,
        "endpoint_props": switches.props,
        "endpoint_metrics": switches.metrics,
        "ui": switches.page,
        "ui_settings": dict(switches.page_settings),
        "chat_template": info.chat_template,
        "chat_template_caps": info.chat_template_caps,
        "bos_token": info.bos_token,
        "eos_token": info.eos_token,
        "build_info": BUILD,
        "is_sleeping": state.sleep is not None and state.sleep.asleep,
        "cors_proxy_enabled": state.tools.proxies,
        "tools_enabled": state.tools.offers,
        **({"chats_kept": True} if switches.chats is not None else {}),
    }


def slot_json(slot: SlotSnapshot) -> dict[str, Any]:
    """Return a slot as an entry of `/slots`; without task fields before its first request."""
    shown: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "speculative": False,
        "is_processing": slot.is_processing,
    }
    request = slot.request
    if request is not None:
        source = request.tag if isinstance(request.tag, GenerationRequest) else GenerationRequest(params=request.params)
        next_token = {
            "has_next_token": slot.has_next_token,
            "has_new_line": slot.has_new_line,
            "n_remain": slot.n_remain,
            "n_decoded": slot.n_decoded,
        }
        shown |= {
            "id_task": slot.id_task,
            "n_prompt_tokens": slot.n_prompt_tokens,
            "n_prompt_tokens_processed": slot.n_prompt_tokens_processed,
            "n_prompt_tokens_cache": slot.n_prompt_tokens_cache,
            "params": generation_settings(source, seed=request.params.sampling.seed, brief=True),
            "next_token": [next_token],
        }
    return shown


def health_body(state: ServerState) -> tuple[int, bytes]:
    """Return status and body of `/health`; while the model is loading, also of every other path."""
    if state.served is not None:
        fault = state.served.engine.snapshot().fault
        if fault is None:
            return 200, _healthy(state.served)
        lost = ApiError("unavailable_error", fault.message, worker=fault.device, since=round(fault.since, 3))
        return lost.status, lost.body
    if state.failure is not None:
        error = ApiError("unavailable_error", f"Failed to load model: {state.failure}")
    else:
        error = loading()
    body = {"error": error.error, "progress": round(state.progress, 4), "stage": state.stage}
    if state.loading_model and not state.access.api_keys:  # this path needs no key
        body["model"] = state.loading_model
    return error.status, orjson.dumps(body)


def live_body(state: ServerState) -> tuple[int, bytes]:
    """Return status and body of `/livez`: 503 only if a restart of the process helps, so never for a lost worker."""
    limit, served = state.switches.hang_timeout, state.served
    seconds = 0.0 if served is None else served.engine.stalled()
    if not limit or seconds <= limit:
        return 200, _HEALTHY
    reason = "its thread has ended" if seconds == math.inf else f"a step takes {seconds:.0f} s already"
    error = ApiError("unavailable_error", f"the engine hangs: {reason} (--hang-timeout {limit:g})")
    return error.status, error.body


def _healthy(served: ServedModel) -> bytes:
    """Return the body of `/health` of a healthy server; `degraded` lists lost devices that it works without."""
    degraded = served.engine.snapshot().degraded
    if not degraded:
        return _HEALTHY
    return orjson.dumps({"status": "ok", "degraded": [_away_json(away) for away in degraded]})


def _away_json(away: Away) -> dict[str, Any]:
    """Return a lost worker and the devices that have its layers now."""
    since = round(away.since, 3)
    return {"device": away.device, "since": since, "why": away.why, "layers": away.layers, "now": dict(away.now)}


def _slots_health(served: ServedModel, query: QueryParams) -> tuple[int, bytes]:
    """Return status and body of `/health` with the query parameters of older llama-servers.

    `include_slots` adds counts of slots; `fail_on_no_slot` returns 503 if all are busy.
    """
    slots = served.engine.snapshot().slots
    busy = sum(slot.is_processing for slot in slots)
    shown: dict[str, Any] = orjson.loads(_healthy(served))
    if "include_slots" in query:
        shown |= {"slots_idle": len(slots) - busy, "slots_processing": busy}
    if "fail_on_no_slot" not in query or busy < len(slots):
        return 200, orjson.dumps(shown)
    return 503, orjson.dumps({"status": "no slot available", "slots_idle": 0, "slots_processing": busy})


def monitor_router(state: ServerState) -> Routes:
    """Return the routes of health checks, models, properties, slots and metrics."""
    router = Routes("monitor")

    @router.get("/livez", responses=_LIVE)
    @router.get("/healthz", responses=_LIVE)  # the liveness probe of old manifests
    async def live(_: Request) -> Response:
        status, body = live_body(state)
        return json_response(body, status)

    @router.get("/readyz", responses=_HEALTH)
    @router.get("/health", responses=_HEALTH, operation=_query("include_slots", "fail_on_no_slot"))
    @router.get("/v1/health", responses=_HEALTH, operation=_query("include_slots", "fail_on_no_slot"))
    async def health(request: Request) -> Response:
        status, body = health_body(state)
        headers = {"Retry-After": str(RETRY_AFTER)} if status == 503 and state.served is not None else None
        if status == 200 and request.url.query and state.served is not None:
            status, body = _slots_health(state.served, request.query_params)
        return json_response(body, status, headers)

    wanted = state.switches.predict
    if wanted is not None and wanted.health not in ("", "/health", "/v1/health"):
        router.add("GET", wanted.health, health, hidden=True)

    @router.get("/v1/models", responses=_MODELS)
    @router.get("/models", responses=_MODELS)
    async def models(_: Request) -> Response:
        return json_response(orjson.dumps(models_json(state.loaded())))

    @router.get("/v1/models/{name:path}", responses=_answers(_MODEL, 404))
    async def model(request: Request) -> Response:
        served, name = state.loaded(), request.path_params["name"]
        if name not in (served.info.name, *served.info.aliases):
            raise ApiError("not_found_error", f"model '{name[:1000]}' not found")
        return json_response(orjson.dumps(model_json(served) | {"id": name}))

    @router.get("/props", responses=_PROPS)
    async def props(_: Request) -> Response:
        return json_response(orjson.dumps(props_json(state.loaded(), state)))

    @router.get(USAGE_PATH, responses=_USAGE, operation=_query("id"))
    async def usage(request: Request) -> Response:
        id = request.query_params.get("id", "")
        if not is_usage_id(id):
            raise invalid("id: expected 32 hexadecimal digits")
        tokens = await state.usage.take(id)
        if tokens is None:
            raise ApiError("not_found_error", "no request of this id has ended")
        return json_response(orjson.dumps({"total_tokens": tokens}))

    @router.post("/props", responses=_CHANGED)
    async def change_props(_: Request) -> Response:
        if not state.switches.props:
            raise not_supported("This server does not support changing global properties. Start it with `--props`")
        return json_response(b'{"success":true}')

    @router.get("/slots", responses=_SLOTS, operation=_query("fail_on_no_slot"))
    async def slots(request: Request) -> Response:
        if not state.switches.slots:
            raise not_supported("This server does not support slots endpoint. Start it with `--slots`")
        snapshot = state.loaded().engine.snapshot()
        if request.query_params.get("fail_on_no_slot") and all(s.is_processing for s in snapshot.slots):
            raise ApiError("unavailable_error", "no slot available", retry_after=1)
        return json_response(orjson.dumps([slot_json(s) for s in snapshot.slots]))

    _add_metrics(router, state)
    return router


def _add_metrics(router: Routes, state: ServerState) -> None:
    scrape = None
    if state.switches.metrics:
        from llamado.server.api.metrics import Scrape

        scrape = Scrape(state)

    @router.get("/metrics", responses=_METRICS)
    async def metrics(_: Request) -> Response:
        if scrape is None:
            raise not_supported("This server does not support metrics endpoint. Start it with `--metrics`")
        headers = {
            "Process-Start-Time-Unix": str(int(state.started)),
            "Content-Type": "text/plain; version=0.0.4",  # without a character set, as llama-server's
        }
        return Response(scrape.text(state.served.snapshot() if state.served else None), headers=headers)
