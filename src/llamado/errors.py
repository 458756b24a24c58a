"""The root of every error a user of llamado can meet."""

from __future__ import annotations


class LlamadoError(Exception):
    """Something a user can cause or meet; its message says what happened, where, and what to do."""
