"""Sources of constraints: grammars and schemas as text, and the triggers of lazy ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llamado.errors import LlamadoError


class GrammarError(LlamadoError):
    """A grammar, a JSON schema, a regular expression or a trigger is unusable; the message has the error and
    its place.
    """


class ConstraintError(LlamadoError):
    """An answer cannot follow its grammar any further: a limit of the parser, or a token that the grammar excludes."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as text: GBNF (llama.cpp's), a JSON schema, a regular expression, or llguidance's Lark dialect."""

    kind: Literal["gbnf", "json_schema", "regex", "lark"]
    text: str


@dataclass(frozen=True, slots=True)
class Trigger:
    """Starts a lazy grammar once it was generated: a word, a regular expression, or a token."""

    kind: Literal["word", "pattern", "token"]
    value: str
    token: int = -1
