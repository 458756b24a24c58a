"""Errors of the `text` package."""

from __future__ import annotations

from llamado.errors import LlamadoError


class TokenizerError(LlamadoError):
    """The vocabulary in a model file is damaged or of an unsupported kind; the message has the key and the remedy."""


class TemplateError(LlamadoError):
    """A chat template cannot be compiled or rendered; `line` is its line in the template, if known."""

    def __init__(self, reason: str, *, name: str = "chat template", line: int | None = None) -> None:
        self.reason = reason
        self.line = line
        place = name if line is None else f"{name}, line {line}"
        super().__init__(f"{place}: {reason}")


class TemplateTooCostly(TemplateError):
    """A chat template exceeds its time limit, or another limit so far that its process ends."""
