"""Errors of the `gguf` package."""

from __future__ import annotations

from pathlib import Path

from llamado.errors import LlamadoError


class GgufError(LlamadoError):
    """A model file violates the GGUF format. The message names the file, the byte offset and the field."""

    def __init__(
        self, reason: str, *, path: Path | str | None = None, offset: int | None = None, field: str | None = None
    ) -> None:
        self.reason = reason
        self.path = path
        self.offset = offset
        self.field = field
        place = "" if offset is None else f" at byte {offset}"
        if field is not None:
            place += f" ({field})"
        super().__init__(f"{'model file' if path is None else path}{place}: {reason}")


class TruncatedFile(GgufError):
    """A model file ends before the data that its header describes."""


class SourceError(LlamadoError):
    """A model could not be found or fetched. The message says what failed and what to do instead."""


class MissingBlob(SourceError):
    """Ollama's manifest refers to a file that is missing from its store."""
