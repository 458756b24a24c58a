"""Lazy grammars: everything is allowed until a trigger was generated, and then the grammar applies.

Triggers work like llama.cpp's `grammar_triggers`: a word or a regular expression is searched in all text generated so
far, and the grammar gets the text from the pattern's first participating group, or from the match, to the end; a token
is passed itself.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from llamado.patterns import LinearPattern
from llamado.text.grammar.matcher import GrammarConstraint, GrammarMatcher
from llamado.text.grammar.source import ConstraintError
from llamado.text.grammar.triggers import Triggers
from llamado.text.grammar.vocabulary import GuidedVocabulary

TOKEN_SECONDS = 0.005
"""Computing time of this thread for all triggers after a token: the tokens of all other answers wait for it."""
FREE_SECONDS = 0.001  # after a token, for any number of tokens of an answer
ANSWER_SECONDS = 0.25
"""Time that all tokens of an answer may take beyond that."""
_seconds = time.thread_time


class LazyConstraint:
    """A grammar that begins with a trigger."""

    lazy = True

    def __init__(self, grammar: GrammarConstraint, triggers: Triggers, vocabulary: GuidedVocabulary) -> None:
        self._grammar = grammar
        self._triggers = triggers
        self._vocabulary = vocabulary

    def start(self) -> LazyMatcher:
        return LazyMatcher(self._grammar, self._triggers, self._vocabulary)

    def end_reasoning(self) -> bool:
        return False


class LazyMatcher:
    """The state of one answer; `has_begun`: its grammar has begun."""

    def __init__(self, grammar: GrammarConstraint, triggers: Triggers, vocabulary: GuidedVocabulary) -> None:
        self._grammar = grammar
        self._triggers = triggers
        self._vocabulary = vocabulary
        self._matcher: GrammarMatcher | None = None
        self._text = bytearray()
        self._tokens: list[tuple[int, int]] = []  # and the end of each in the text
        self._left = ANSWER_SECONDS
        self._tried = 0  # matches that begin before this position did not lead into the grammar

    @property
    def has_begun(self) -> bool:
        return self._matcher is not None

    def mask(self) -> NDArray[np.uint32] | None:
        return None if self._matcher is None else self._matcher.mask()

    def accept(self, token: int) -> None:
        if self._matcher is not None:
            self._matcher.accept(token)
            return
        if token in self._triggers.tokens and self._begin([token]):
            return
        before = len(self._text)
        self._text += self._vocabulary.tokenizer.piece(token, special=True)
        self._tokens.append((token, len(self._text)))
        if len(self._text) > before:
            began = _seconds()
            self._search(before, min(TOKEN_SECONDS, FREE_SECONDS + self._left))
            self._left -= max(0.0, _seconds() - began - FREE_SECONDS)
        if not self._triggers.patterns:
            self._forget()

    def _search(self, before: int, seconds: float) -> None:
        """Search for a trigger that ends after `before`, and begin with it. Raises ConstraintError."""
        deadline = _seconds() + seconds
        for word in self._triggers.words:
            start = self._text.find(word, max(0, before - len(word) + 1))
            while start >= 0:
                if self._begin_at(start):
                    return
                if _seconds() > deadline:
                    raise _too_slow(word.decode(errors="replace"))
                start = self._text.find(word, start + 1)
        text = bytes(self._text)
        for source, pattern in self._triggers.patterns:
            start = _first(pattern, text)
            # A search cannot be stopped, and its time grows with the text: the first one that is too slow ends the
            # answer.
            if _seconds() > deadline:
                raise _too_slow(source)
            if start >= self._tried:
                if self._begin_at(start):
                    return
                self._tried = start + 1

    def _begin_at(self, start: int) -> bool:
        tokens: list[int] = []
        begin = 0
        for token, end in self._tokens:
            if begin >= start and end > begin:
                tokens.append(token)
            elif end > start:
                tokens += self._vocabulary.spell_bytes(bytes(self._text[start:end]))
            begin = end
        return self._begin(tokens)

    def _begin(self, tokens: list[int]) -> bool:
        """Begin the grammar with these tokens; False if it excludes them: the match was plain text, not a trigger."""
        matcher = self._grammar.start()
        if not matcher.advance(tokens):
            return False
        self._matcher = matcher
        self._text.clear()
        self._tokens.clear()
        return True

    def _forget(self) -> None:
        """Drop the text that no word can reach back to."""
        spare = len(self._text) - self._triggers.reach
        n = 0
        while n < len(self._tokens) and self._tokens[n][1] <= spare:
            n += 1
        if n:
            cut = self._tokens[n - 1][1]
            del self._text[:cut]
            self._tokens = [(token, end - cut) for token, end in self._tokens[n:]]


def _first(pattern: LinearPattern, text: bytes) -> int:
    """Return where the grammar begins: at the first group with text, else at the match; -1 if there is none."""
    spans = pattern.spans(text)
    return next((start for start, end in spans[1:] if end > start), spans[0][0] if spans else -1)


def _too_slow(trigger: str) -> ConstraintError:
    return ConstraintError(
        f"looking for the grammar's triggers takes longer than {1000 * TOKEN_SECONDS:g} ms after a token, or "
        f"{1000 * ANSWER_SECONDS:g} ms in all, at {trigger[:200]!r}; use fewer or simpler patterns, or words"
    )
