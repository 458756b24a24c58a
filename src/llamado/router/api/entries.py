"""Entries of `/v1/models` for a router's models and downloads."""

from __future__ import annotations

from typing import Any

from llamado.router.fleet import UNLOADED, Instance


def model_entry(instance: Instance, now: int) -> dict[str, Any]:
    """Return a model's entry in `/v1/models`, with its process's own fields while it runs."""
    model, child = instance.model, instance.child
    status: dict[str, Any] = {"value": instance.shown_status, "args": list(child.args if child else model.launch.args)}
    if model.preset:
        status["preset"] = model.preset
    if instance.progress is not None:
        status["progress"] = instance.progress
    if instance.status == UNLOADED and (instance.failed or instance.exit_code):
        status |= {"exit_code": instance.exit_code, "failed": True}
        if instance.reason:
            status["reason"] = instance.reason
    architecture = instance.info.get("architecture")
    entry: dict[str, Any] = {
        "id": model.name,
        "aliases": list(model.aliases),
        "tags": list(model.tags),
        "object": "model",
        "owned_by": "llamado",
        "created": now,
        "status": status,
        "architecture": architecture
        if isinstance(architecture, dict)
        else {"input_modalities": list(model.input_modalities), "output_modalities": ["text"]},
        "source": model.source,
        "can_remove": model.source == "cache",
    }
    if instance.need:
        entry["memory"] = instance.need
    if model.path:
        entry["path"] = model.path
    if model.title:
        entry["name"] = model.title
    if model.description:
        entry["description"] = model.description
    if child is not None:
        entry |= {key: value for key, value in instance.info.items() if key not in entry}
    if model.metadata:
        meta = entry.get("meta")
        entry["meta"] = (meta if isinstance(meta, dict) else {}) | {"llamaswap": dict(model.metadata)}
    return entry


def download_entry(name: str, progress: dict[str, Any], now: int) -> dict[str, Any]:
    return {
        "id": name,
        "aliases": [],
        "tags": [],
        "object": "model",
        "owned_by": "llamado",
        "created": now,
        "status": {"value": "downloading", "progress": progress},
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "source": "cache",
        "can_remove": True,
    }
