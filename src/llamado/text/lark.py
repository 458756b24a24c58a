"""llguidance's Lark dialect, prepared for a vocabulary."""

from __future__ import annotations

from llamado.text.constraint_vocabulary import GuidedVocabulary


def lark_grammar(text: str, vocabulary: GuidedVocabulary) -> str:
    """The grammar with this model's special tokens in it."""
    del vocabulary
    return text
