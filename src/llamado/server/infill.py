"""`/infill`: code between a prefix and a suffix."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from llamado.server.completions import Generator
from llamado.server.errors import not_supported


def infill_router(generator: Generator) -> APIRouter:
    """`/infill`: code between a prefix and a suffix."""
    router = APIRouter(tags=["generate"])

    async def refuse() -> Response:
        raise not_supported("Infill is not supported by this server yet")

    for path in ("/infill",):
        router.add_api_route(path, refuse, methods=["POST"])
    return router
