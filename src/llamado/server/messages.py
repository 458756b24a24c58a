"""Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter

from llamado.server.completions import Generator


def messages_router(generator: Generator) -> APIRouter:
    """Anthropic's Messages API."""
    return APIRouter(tags=["generate"])
