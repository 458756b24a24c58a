"""Grammars as llama-cpp-python takes them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from llamado.library.errors import LibraryError
from llamado.text.grammar.source import GrammarSource


@dataclass(frozen=True)
class LlamaGrammar:
    """What an answer must look like, for the argument `grammar`."""

    source: GrammarSource

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> Self:
        """A grammar in GBNF; what is wrong with it is said by whoever uses it."""
        return cls(GrammarSource("gbnf", grammar))

    @classmethod
    def from_file(cls, file: str | os.PathLike[str], verbose: bool = True) -> Self:
        """A file with a grammar in GBNF. Raises LibraryError."""
        try:
            return cls.from_string(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise LibraryError(f"the grammar {file} cannot be read: {error}") from None

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> Self:
        """Any instance of a JSON schema, which is given as JSON text."""
        return cls(GrammarSource("json_schema", json_schema))
