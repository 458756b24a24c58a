"""Grammars with llama-cpp-python's interface."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from llamado.library.errors import LibraryError
from llamado.text.grammar.source import GrammarSource


@dataclass(frozen=True)
class LlamaGrammar:
    """A grammar of answers, for the argument `grammar`."""

    source: GrammarSource

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> Self:
        """Create a grammar from GBNF text; errors in it are raised by the first request that uses it."""
        return cls(GrammarSource("gbnf", grammar))

    @classmethod
    def from_file(cls, file: str | os.PathLike[str], verbose: bool = True) -> Self:
        """Read a grammar from a GBNF file. Raises LibraryError."""
        try:
            return cls.from_string(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise LibraryError(f"the grammar {file} cannot be read: {error}") from None

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> Self:
        """Create a grammar of the instances of a JSON schema, given as JSON text."""
        return cls(GrammarSource("json_schema", json_schema))
