"""The errors of the `text` room."""

from __future__ import annotations

from llamado.errors import LlamadoError


class TokenizerError(LlamadoError):
    """The vocabulary in a model file is damaged or of a kind that is not supported; says which key and what to do."""


class TemplateError(LlamadoError):
    """A chat template cannot be compiled or rendered; `line` is its line in the template, where one is known."""

    def __init__(self, reason: str, *, name: str = "chat template", line: int | None = None) -> None:
        self.reason = reason
        self.line = line
        place = name if line is None else f"{name}, line {line}"
        super().__init__(f"{place}: {reason}")


class TemplateTooCostly(TemplateError):
    """A chat template takes more time than it is given, or so much of something else that its process ends."""
