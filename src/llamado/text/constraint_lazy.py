"""Lazy grammars: everything is allowed until a trigger was generated, from there on the grammar rules.

What triggers do is what llama.cpp makes of `grammar_triggers`: a word or a regular expression is looked for in all
that was generated so far, and the grammar is fed with the text from the pattern's first group that took part, or from
the match, to the end; a token is fed itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import regex  # type: ignore[import-untyped]
from numpy.typing import NDArray

from llamado.text.constraint_grammar import GrammarConstraint, GrammarMatcher
from llamado.text.constraint_vocabulary import GuidedVocabulary
from llamado.text.grammar import ConstraintError, GrammarError, Trigger

MAX_TRIGGERS = 64
MAX_PATTERN = 2_000  # characters
MAX_REPEATS = 100_000
CACHED_PATTERN = 256  # characters up to which `regex` may remember it, in hundreds of others
_SEARCH_SECONDS = 0.1  # for a pattern after each token


class Triggers:
    """Triggers made ready for one vocabulary. Raises GrammarError."""

    def __init__(self, triggers: Sequence[Trigger], vocabulary: GuidedVocabulary) -> None:
        if len(triggers) > MAX_TRIGGERS:
            raise GrammarError(f"{len(triggers)} grammar triggers are too many; at most {MAX_TRIGGERS} are allowed")
        self.tokens: set[int] = set()
        self.words: list[bytes] = []
        self.patterns: list[regex.Pattern[str]] = []
        for trigger in triggers:
            if trigger.kind == "pattern":
                self.patterns.append(_compiled(trigger.value))
            elif trigger.kind == "token":
                self.tokens.add(_token(trigger, vocabulary))
            elif trigger.value:
                self.words.append(trigger.value.encode("utf-8", "replace"))
            else:
                raise GrammarError("a grammar trigger is empty; give the word that starts the grammar")
        self.reach = max(map(len, self.words), default=1) - 1
        """How many bytes before a token a word that ends in it may begin."""


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
    """One answer; `begun` says whether its grammar has begun."""

    def __init__(self, grammar: GrammarConstraint, triggers: Triggers, vocabulary: GuidedVocabulary) -> None:
        self._grammar = grammar
        self._triggers = triggers
        self._vocabulary = vocabulary
        self._matcher: GrammarMatcher | None = None
        self._text = bytearray()
        self._tokens: list[tuple[int, int]] = []  # and where each ends in the text
        self._tried = 0  # matches that begin before here did not lead into the grammar

    @property
    def begun(self) -> bool:
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
            self._search(before)
        if not self._triggers.patterns:
            self._forget()

    def _search(self, before: int) -> None:
        """Look for a trigger that ends after `before`, and begin with it."""
        for word in self._triggers.words:
            start = self._text.find(word, max(0, before - len(word) + 1))
            while start >= 0:
                if self._begin_at(start):
                    return
                start = self._text.find(word, start + 1)
        if not self._triggers.patterns:
            return
        # Bytes that are no character (yet) keep their number.
        text = self._text.decode("utf-8", "surrogateescape")
        for pattern in self._triggers.patterns:
            start = self._first(pattern, text)
            if start >= self._tried:
                if self._begin_at(start):
                    return
                self._tried = start + 1

    def _first(self, pattern: regex.Pattern[str], text: str) -> int:
        """The byte at which the grammar begins by a pattern; -1: nowhere."""
        try:
            found = pattern.search(text, timeout=_SEARCH_SECONDS, concurrent=True)
        except TimeoutError:
            raise ConstraintError(
                f"looking for the grammar trigger {pattern.pattern!r} takes longer than {_SEARCH_SECONDS:g} s; "
                "use a simpler pattern"
            ) from None
        if found is None:
            return -1
        starts = (found.start(i) for i in range(1, pattern.groups + 1) if found.end(i) > found.start(i))
        return len(text[: next(starts, found.start())].encode("utf-8", "surrogateescape"))

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
        """Begin the grammar with these tokens; False where it excludes them: that was no trigger but mere text."""
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


def _compiled(pattern: str) -> regex.Pattern[str]:
    if len(pattern) > MAX_PATTERN:
        raise GrammarError(f"a grammar trigger of {len(pattern)} characters is too long; at most {MAX_PATTERN}")
    # `regex` writes repeated parts out as often as they are repeated at least.
    if math.prod(max(1, int(n[:9])) for n in regex.findall(r"\{([0-9]+)", pattern)) > MAX_REPEATS:
        raise GrammarError(f"the grammar trigger {pattern[:200]!r} repeats parts more than {MAX_REPEATS} times")
    if len(pattern) > 1 and pattern.startswith("^") and pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern = pattern[:-1] + r"\Z"  # ECMAScript's $ does not look past a final line feed
    try:
        return regex.compile(pattern, cache_pattern=len(pattern) <= CACHED_PATTERN)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise GrammarError(f"the grammar trigger {pattern[:200]!r} is no regular expression: {error}") from None


def _token(trigger: Trigger, vocabulary: GuidedVocabulary) -> int:
    if 0 <= trigger.token < vocabulary.tokenizer.n_vocab:
        return trigger.token
    tokens = vocabulary.spell(trigger.value)
    if len(tokens) != 1:
        raise GrammarError(f"the grammar trigger {trigger.value!r} is not one token of this model; use a word instead")
    return tokens[0]
