"""How the Hugging Face hub is reached, by the environment that its own library reads."""

from __future__ import annotations

import os

from llamado.processes.secret_values import secret

HUB = "https://huggingface.co"


def hub_access() -> tuple[str | None, str | None]:
    """The hub's address, where it is another one, and the user's token."""
    return os.environ.get("HF_ENDPOINT") or None, secret("HF_TOKEN")


def offline() -> bool:
    """Whether nothing is to be asked of a network (`--offline`)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
