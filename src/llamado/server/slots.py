"""Saving, restoring and erasing what slots hold."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from llamado.server.errors import not_supported
from llamado.server.state import ServerState


def slots_router(state: ServerState) -> APIRouter:
    """Saving, restoring and erasing what slots hold."""
    router = APIRouter(tags=["slots"])

    async def refuse() -> Response:
        raise not_supported("This server does not support slots action. Start it with `--slot-save-path`")

    for path in ("/slots/{id_slot}",):
        router.add_api_route(path, refuse, methods=["POST"])
    return router
