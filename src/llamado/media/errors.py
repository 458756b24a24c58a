"""Errors of media in requests."""

from __future__ import annotations

from llamado.errors import LlamadoError


class MediaError(LlamadoError):
    """A picture or sound cannot be used: unknown format, damaged, empty, or beyond a limit."""
