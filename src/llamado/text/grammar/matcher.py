"""Answers under a grammar that llguidance has compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.text.grammar.guidance import GuidedMatcher
from llamado.text.grammar.source import ConstraintError, GrammarError

Mask = NDArray[np.uint32]


class GrammarMatcher:
    """One answer under a grammar."""

    def __init__(self, matcher: GuidedMatcher, first: Mask) -> None:
        self._matcher = matcher
        self._mask = first.copy()
        self._fresh = True  # whether the mask belongs to the present state

    def mask(self) -> Mask:
        if not self._fresh:
            fill(self._matcher, self._mask)
            self._fresh = True
        return self._mask

    def accept(self, token: int) -> None:
        self._fresh = False
        if not self._matcher.accept(token):
            raise ConstraintError(f"token {token} does not fit the grammar: {self._matcher.error}")

    def advance(self, tokens: list[int]) -> bool:
        """Accept all of these tokens, or none and say so."""
        self._fresh = False
        return self._matcher.accept_all(tokens)


class GrammarConstraint:
    """A compiled grammar: a matcher at the beginning of an answer, and its mask there.

    `words`: uint32 words of a mask. Raises GrammarError where no answer can begin.
    """

    def __init__(self, matcher: GuidedMatcher, words: int) -> None:
        self._matcher = matcher
        self._first = np.zeros(words, np.uint32)
        try:
            fill(matcher, self._first)
        except ConstraintError as error:
            raise GrammarError(str(error)) from None

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.copy(), self._first)

    def after(self, tokens: list[int], text: str) -> GrammarConstraint:
        """The same grammar for answers of which the prompt holds the beginning. Raises GrammarError."""
        matcher = self._matcher.copy()
        if not matcher.accept_all(tokens):
            raise GrammarError(f"the grammar does not allow what the prompt ends with: {text!r}")
        return GrammarConstraint(matcher, len(self._first))

    def end_reasoning(self) -> bool:
        return False


def fill(matcher: GuidedMatcher, mask: Mask) -> None:
    """Write the mask of the matcher's state, without the interpreter's lock. Raises ConstraintError."""
    matcher.mask(mask)
    if matcher.error:
        raise ConstraintError(f"the grammar cannot be followed any further: {matcher.error}")
    if not mask.any():
        raise ConstraintError("the grammar allows no token of this model's vocabulary here")
