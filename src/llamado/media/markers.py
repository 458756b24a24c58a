"""Markers: text that stands for a picture or sound in a prompt."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import cache
from typing import Any

VARIABLE = "LLAMA_MEDIA_MARKER"
"""Environment variable with the marker of a server, as in llama-server."""


def new_marker() -> str:
    """Return a marker that cannot be guessed."""
    return f"<__media_{secrets.token_hex(16)}__>"


@cache
def server_marker() -> str:
    """Return the marker of this process's server: that of LLAMA_MEDIA_MARKER, or a random one."""
    return os.environ.get(VARIABLE) or new_marker()


class MarkerPart(dict[str, Any]):
    """The content part that replaces a picture or sound. No JSON body has one."""


def joined(content: Sequence[Any]) -> str:
    """Return content with markers as one text, without line feeds around the markers (`concat_content_parts`)."""
    whole, behind_marker = "", True
    for part in content:
        is_marker = isinstance(part, MarkerPart)
        if not is_marker and not behind_marker and whole:
            whole += "\n"
        whole += str(part["text"])
        behind_marker = is_marker
    return whole
