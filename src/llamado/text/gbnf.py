"""GBNF, llama.cpp's grammar format → llguidance's Lark."""

from __future__ import annotations

from llguidance.gbnf_to_lark import gbnf_to_lark

from llamado.text.constraint_vocabulary import GuidedVocabulary
from llamado.text.grammar import GrammarError


def gbnf_grammar(text: str, vocabulary: GuidedVocabulary) -> str:
    """llguidance's Lark for a GBNF grammar. Raises GrammarError."""
    try:
        return gbnf_to_lark(text)
    except Exception as error:
        raise GrammarError(f"Failed to parse grammar: {error}") from None
