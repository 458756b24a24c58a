"""Embeddings and reranking."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from llamado.server.errors import not_supported
from llamado.server.state import ServerState


def embeddings_router(state: ServerState) -> APIRouter:
    """Embeddings and reranking."""
    router = APIRouter(tags=["embeddings"])

    def refused(paths: tuple[str, ...], message: str) -> None:
        async def refuse() -> Response:
            raise not_supported(message)

        for path in paths:
            router.add_api_route(path, refuse, methods=["POST"])

    refused(
        ("/embedding", "/embeddings", "/v1/embeddings"),
        "This server does not support embeddings. Start it with `--embeddings`",
    )
    refused(
        ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
        "This server does not support reranking. Start it with `--reranking`",
    )
    return router
