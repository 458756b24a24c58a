"""What a caller of the library can do wrong."""

from __future__ import annotations

from llamado.errors import LlamadoError


class LibraryError(LlamadoError, ValueError):
    """An argument that means nothing here, or cannot be had with the model as it was loaded."""
