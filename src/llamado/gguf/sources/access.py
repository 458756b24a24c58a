"""Hugging Face hub access, configured by the environment variables that huggingface_hub reads."""

from __future__ import annotations

import os

from llamado.processes.secret_values import secret

HUB = "https://huggingface.co"


def hub_access() -> tuple[str | None, str | None]:
    """Return the hub's address, if it is not the default, and the user's token."""
    return os.environ.get("HF_ENDPOINT") or None, secret("HF_TOKEN")


def offline() -> bool:
    """Return True if network access is disabled (`--offline`)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
