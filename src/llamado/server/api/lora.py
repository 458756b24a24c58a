"""`/lora-adapters`: list LoRA adapters and set their scales (tools/server/README.md, b11434)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.http.answer import json_response
from llamado.http.json_body import read_json
from llamado.server.api.routes import Routes
from llamado.server.errors import invalid
from llamado.server.generate.fields import lora_scales
from llamado.server.model import AdapterInfo
from llamado.server.state import ServerState


@runtime_checkable
class LoraEngine(Protocol):
    """An engine with LoRA adapters and their default scales."""

    @property
    def lora(self) -> tuple[float, ...]: ...

    def set_lora(self, scales: Mapping[int, float]) -> None: ...


def _invocation(info: AdapterInfo) -> dict[str, Any]:
    """Return the fields with the invocation of an activated LoRA."""
    if not info.invocation:
        return {}
    return {"alora_invocation_string": info.invocation_text, "alora_invocation_tokens": info.invocation}


def lora_router(state: ServerState) -> Routes:
    """Return the routes of `/lora-adapters`."""
    router = Routes("lora")

    @router.get("/lora-adapters")
    async def adapters(_: Request) -> Response:
        model = state.loaded()
        scales = model.engine.lora if isinstance(model.engine, LoraEngine) else ()
        found = [
            {"id": i, "path": info.path, "scale": scale, "task_name": info.task_name,
             "prompt_prefix": info.prompt_prefix} | _invocation(info)
            for i, (info, scale) in enumerate(zip(model.info.adapters, scales, strict=False))
        ]  # fmt: skip
        return json_response(orjson.dumps(found))

    @router.post("/lora-adapters")
    async def apply(request: Request) -> Response:
        engine = state.loaded().engine
        entries = await read_json(request)
        if not isinstance(entries, list):
            raise invalid("Request body must be an array")
        if isinstance(engine, LoraEngine):
            engine.set_lora(lora_scales(entries))
        return json_response(b'{"success":true}')

    return router
