"""What an answer must look like: grammars and schemas as text, and what starts a lazy one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llamado.errors import LlamadoError


class GrammarError(LlamadoError):
    """A grammar, a JSON schema, a regular expression or a trigger cannot be used; says what is wrong and where."""


class ConstraintError(LlamadoError):
    """An answer cannot be held to its grammar any further: a limit of the parser, or a token the grammar excludes."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as text: GBNF (llama.cpp's), a JSON schema, a regular expression, or llguidance's Lark dialect."""

    kind: Literal["gbnf", "json_schema", "regex", "lark"]
    text: str


@dataclass(frozen=True, slots=True)
class Trigger:
    """What, once it was generated, makes a lazy grammar begin: a word, a regular expression, or a token."""

    kind: Literal["word", "pattern", "token"]
    value: str
    token: int = -1
