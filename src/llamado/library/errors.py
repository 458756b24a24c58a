"""Errors of the library."""

from __future__ import annotations

from llamado.errors import LlamadoError


class LibraryError(LlamadoError, ValueError):
    """An argument that is not supported, or not possible with the options the model was loaded with."""
