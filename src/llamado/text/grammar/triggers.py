"""Triggers of lazy grammars, prepared for one vocabulary: words, tokens and patterns."""

from __future__ import annotations

from collections.abc import Sequence

from llamado.patterns import LinearPattern, PatternError
from llamado.text.grammar.source import GrammarError, Trigger
from llamado.text.grammar.vocabulary import GuidedVocabulary

MAX_TRIGGERS = 64
MAX_SIZE = 10_000  # instructions of all patterns of a request


class Triggers:
    """Triggers prepared for one vocabulary. Raises GrammarError."""

    def __init__(self, triggers: Sequence[Trigger], vocabulary: GuidedVocabulary) -> None:
        if len(triggers) > MAX_TRIGGERS:
            raise GrammarError(f"{len(triggers)} grammar triggers are too many; at most {MAX_TRIGGERS} are allowed")
        self.tokens: set[int] = set()
        self.words: list[bytes] = []
        self.patterns: list[tuple[str, LinearPattern]] = []
        """Patterns as written and compiled."""
        size = 0
        for trigger in triggers:
            if trigger.kind == "pattern":
                try:
                    pattern = LinearPattern(trigger.value)
                except PatternError as error:
                    raise GrammarError(f"the grammar trigger {_shown(trigger.value)} cannot be used: {error}") from None
                size += pattern.size
                if size > MAX_SIZE:
                    raise GrammarError(
                        f"the patterns of the triggers are too large together, from {_shown(trigger.value)} on: "
                        f"they may have {MAX_SIZE} instructions; repeat less, or fewer times"
                    )
                self.patterns.append((trigger.value, pattern))
            elif trigger.kind == "token":
                self.tokens.add(_token(trigger, vocabulary))
            elif trigger.value:
                self.words.append(trigger.value.encode("utf-8", "replace"))
            else:
                raise GrammarError("a grammar trigger is empty; give the word that starts the grammar")
        self.reach = max(map(len, self.words), default=1) - 1
        """Bytes before a token within which a word that ends in it may begin."""


def _shown(pattern: str) -> str:
    return repr(pattern[:200])


def _token(trigger: Trigger, vocabulary: GuidedVocabulary) -> int:
    if 0 <= trigger.token < vocabulary.tokenizer.n_vocab:
        return trigger.token
    tokens = vocabulary.spell(trigger.value)
    if len(tokens) != 1:
        raise GrammarError(f"the grammar trigger {trigger.value!r} is not one token of this model; use a word instead")
    return tokens[0]
