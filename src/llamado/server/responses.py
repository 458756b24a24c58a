"""OpenAI's Responses API."""

from __future__ import annotations

from fastapi import APIRouter

from llamado.server.completions import Generator


def responses_router(generator: Generator) -> APIRouter:
    """OpenAI's Responses API."""
    return APIRouter(tags=["generate"])
