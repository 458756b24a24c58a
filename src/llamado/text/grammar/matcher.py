"""Answers constrained by a grammar that llguidance has compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamado.text.grammar.deep_stack import with_deep_stack
from llamado.text.grammar.guidance import GuidedMatcher
from llamado.text.grammar.source import ConstraintError, GrammarError

Mask = NDArray[np.uint32]


class GrammarMatcher:
    """The state of one answer."""

    def __init__(self, constraint: GrammarConstraint, matcher: GuidedMatcher, first: Mask) -> None:
        self._constraint = constraint
        self._matcher = matcher
        self._mask = first.copy()
        self._fresh = True  # True if the mask belongs to the current state
        self._tokens: list[int] = []

    def mask(self) -> Mask:
        if not self._fresh:
            try:
                fill(self._matcher, self._mask)
            except ConstraintError:
                self._start_over()
                fill(self._matcher, self._mask)
            self._fresh = True
        return self._mask

    def accept(self, token: int) -> None:
        self._fresh = False
        if not self._matcher.accept(token):
            error = self._matcher.error
            if _FULL not in error:
                raise ConstraintError(f"token {token} does not fit the grammar: {error}")
            self._start_over()
            if not self._matcher.accept(token):
                raise ConstraintError(f"token {token} does not fit the grammar: {self._matcher.error}")
        self._tokens.append(token)

    def advance(self, tokens: list[int]) -> bool:
        """Accept all of these tokens, or return False and accept none."""
        self._fresh = False
        if not self._matcher.accept_all(tokens):
            return False
        self._tokens += tokens
        return True

    def _start_over(self) -> None:
        """Continue with a new lexer if other answers have filled the old one with their states. Raises
        ConstraintError.
        """
        error = self._matcher.error
        if _FULL in error:
            self._matcher = self._constraint.renew(self._matcher)
            if self._matcher.accept_all(self._tokens):
                return
        raise ConstraintError(f"the grammar cannot be followed any further: {error}")


_FULL = "too many states"


class GrammarConstraint:
    """A compiled grammar: a matcher at the beginning of an answer, and its mask there.

    `words`: uint32 words of a mask; `before`: tokens that the matcher has accepted. Raises GrammarError if no answer
    can begin.
    """

    def __init__(self, matcher: GuidedMatcher, words: int, before: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._before = before
        self._first = np.zeros(words, np.uint32)
        try:
            fill(matcher, self._first)
        except ConstraintError as error:
            raise GrammarError(str(error)) from None

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self, self._matcher.copy(), self._first)

    def after(self, tokens: list[int], text: str) -> GrammarConstraint:
        """Return the same grammar for answers that begin in the prompt. Raises GrammarError."""
        matcher = self._matcher.copy()
        if not matcher.accept_all(tokens):
            raise GrammarError(f"the grammar does not allow the end of the prompt: {text!r}")
        return GrammarConstraint(matcher, len(self._first), tokens)

    def renew(self, full: GuidedMatcher) -> GuidedMatcher:
        """Return a matcher at the beginning of an answer with a new lexer, which later answers share."""
        matcher = with_deep_stack(full.recompiled)
        matcher.accept_all(self._before)
        self._matcher = matcher
        return matcher.copy()

    def end_reasoning(self) -> bool:
        return False


def fill(matcher: GuidedMatcher, mask: Mask) -> None:
    """Write the mask of the matcher's state, without the interpreter's lock. Raises ConstraintError."""
    matcher.mask(mask)
    if matcher.error:
        raise ConstraintError(f"the grammar cannot be followed any further: {matcher.error}")
    if not mask.any():
        raise ConstraintError("the grammar allows no token of this model's vocabulary here")
