"""LoRA adapters: which there are and how strong they are."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from llamado.server.errors import not_supported
from llamado.server.state import ServerState
from llamado.server.streaming import json_response


def lora_router(state: ServerState) -> APIRouter:
    """LoRA adapters: which there are and how strong they are."""
    router = APIRouter(tags=["lora"])

    @router.get("/lora-adapters")
    async def lora_adapters() -> Response:
        return json_response(b"[]")

    async def refuse() -> Response:
        raise not_supported("LoRA adapters are not supported by this server yet")

    for path in ("/lora-adapters",):
        router.add_api_route(path, refuse, methods=["POST"])
    return router
