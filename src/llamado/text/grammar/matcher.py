"""Answers under a grammar that llguidance has compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from llamado.text.grammar.source import ConstraintError, GrammarError

Mask = NDArray[np.uint32]


class GrammarMatcher:
    """One answer under a grammar."""

    def __init__(self, matcher: LLMatcher, first: Mask) -> None:
        self._matcher = matcher
        self._mask = first.copy()
        self._address = self._mask.ctypes.data
        self._fresh = True  # whether the mask belongs to the present state

    def mask(self) -> Mask:
        if not self._fresh:
            fill(self._matcher, self._mask, self._address)
            self._fresh = True
        return self._mask

    def accept(self, token: int) -> None:
        self._fresh = False
        if not _guarded(self._matcher.consume_token, token):
            raise ConstraintError(f"token {token} does not fit the grammar: {reason(self._matcher)}")

    def advance(self, tokens: list[int]) -> bool:
        """Accept all of these tokens, or none and say so."""
        if self._matcher.validate_tokens(tokens) < len(tokens):
            return False
        self._fresh = False
        return self._matcher.consume_tokens(tokens)


class GrammarConstraint:
    """A compiled grammar: a matcher at the beginning of an answer, and its mask there.

    `words`: uint32 words of a mask. Raises GrammarError where no answer can begin.
    """

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._first = np.zeros(words, np.uint32)
        try:
            fill(matcher, self._first, self._first.ctypes.data)
        except ConstraintError as error:
            raise GrammarError(str(error)) from None

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._first)

    def after(self, tokens: list[int], text: str) -> GrammarConstraint:
        """The same grammar for answers of which the prompt holds the beginning. Raises GrammarError."""
        matcher = self._matcher.deep_copy()
        if matcher.validate_tokens(tokens) < len(tokens) or not matcher.consume_tokens(tokens):
            raise GrammarError(f"the grammar does not allow what the prompt ends with: {text!r}")
        return GrammarConstraint(matcher, len(self._first))

    def end_reasoning(self) -> bool:
        return False


def fill(matcher: LLMatcher, mask: Mask, address: int) -> None:
    """Write the mask of the matcher's state, without the interpreter's lock. Raises ConstraintError."""
    _guarded(matcher.unsafe_compute_mask_ptr, address, mask.nbytes)
    if matcher.is_error():
        raise ConstraintError(f"the grammar cannot be followed any further: {reason(matcher)}")
    if not mask.any():
        raise ConstraintError("the grammar allows no token of this model's vocabulary here")


def _guarded(call: Callable[..., Any], *arguments: int) -> Any:
    """Call llguidance; where that comes to a bug of its own, it is an error like others."""
    try:
        return call(*arguments)
    except Exception:
        raise
    except BaseException as panic:  # so that nobody catches it by accident, but this answer alone shall end
        if type(panic).__name__ != "PanicException":
            raise
        raise ConstraintError(f"the grammar's parser came to an end: {panic}") from None


def reason(matcher: LLMatcher) -> str:
    """Why a matcher failed, as llguidance says it."""
    return matcher.get_error().strip() or matcher.stop_reason()
