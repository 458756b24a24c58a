"""The errors of the `gguf` room."""

from __future__ import annotations

from pathlib import Path

from llamado.errors import LlamadoError


class GgufError(LlamadoError):
    """A model file is not what the GGUF format promises; says which file, at which byte and in which field."""

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
    """A model file ends before all that its header promises."""


class SourceError(LlamadoError):
    """A model could not be found or fetched; says what failed and what to do instead."""


class MissingBlob(SourceError):
    """Ollama's manifest names a file that its store does not have."""
