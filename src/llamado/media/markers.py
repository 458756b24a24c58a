"""Markers: text that stands for a picture or sound in a prompt."""

from __future__ import annotations

import os

from llamado.text.dialects.answer import random_id

VARIABLE = "LLAMA_MEDIA_MARKER"
"""Environment variable with the marker of a server, as in llama-server."""


def new_marker() -> str:
    """Return a marker that cannot be guessed."""
    return f"<__media_{random_id()}__>"


def server_marker() -> str:
    """Return the marker of a server: that of LLAMA_MEDIA_MARKER, or a new one."""
    return os.environ.get(VARIABLE) or new_marker()
