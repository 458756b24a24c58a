"""The OpenAPI description of the endpoints that generate, from tables."""

from __future__ import annotations

from typing import Any

from llamado.server.options import ENGINE_FIELDS, SERVER_FIELDS


def describe(name: str) -> dict[str, Any]:
    """Keyword arguments of a route: its body and its answers."""
    properties: dict[str, Any] = {}
    for spec in ENGINE_FIELDS + SERVER_FIELDS:
        for key in spec.names:
            properties[key] = {"type": [spec.type, "null"], "description": spec.help}
    schema = {"type": "object", "properties": properties}
    return {"openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}}
