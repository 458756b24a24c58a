"""Functions of the caller in an answer: logits processors and stopping criteria.

They are called on the engine's thread, for their own request only. Tokens of other requests are sampled natively, and
wait while a function runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.library.errors import LibraryError

TokenArray = NDArray[np.intc]
Logits = NDArray[np.float32]
LogitsProcessor = Callable[[TokenArray, Logits], Logits]
"""Return the logits of the next token, given the tokens so far and its logits, which may be changed in place."""
StoppingCriteria = Callable[[TokenArray, Logits], bool]
"""Return True to end the answer before the next token, given the same arguments."""


class LogitsProcessorList(list[LogitsProcessor]):
    """Logits processors that are called one after the other."""

    def __call__(self, input_ids: TokenArray, scores: Logits) -> Logits:
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Stopping criteria; any one of them ends the answer."""

    def __call__(self, input_ids: TokenArray, logits: Logits) -> bool:
        return any(criterion(input_ids, logits) for criterion in self)


class MinTokensLogitsProcessor:
    """Forbids a token, the one that ends an answer, until the answer has `min_tokens` tokens."""

    def __init__(self, min_tokens: int, token_eos: int) -> None:
        self.min_tokens = min_tokens
        self.token_eos = token_eos
        self.prompt_tokens: int | None = None
        """Tokens of the prompt: those of the first call."""

    def __call__(self, input_ids: TokenArray, scores: Logits) -> Logits:
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) - self.prompt_tokens < self.min_tokens:
            scores[self.token_eos] = -np.inf
        return scores


class Hooks:
    """The functions of one request, as the engine calls them. `error`: the error that one of them raised."""

    def __init__(self, processor: object = None, criteria: object = None) -> None:
        """Each is a function, or a list of functions. Raises LibraryError."""
        self._processor = _combine("logits_processor", processor, LogitsProcessorList)
        self._criteria = _combine("stopping_criteria", criteria, StoppingCriteriaList)
        self.error: Exception | None = None

    def fields(self) -> dict[str, Any]:
        """Return fields of the engine's Request."""
        found: dict[str, Any] = {}
        if self._processor is not None:
            found["processor"] = self.process
        if self._criteria is not None:
            found["until"] = self._until
        return found

    def process(self, tokens: TokenArray, row: Logits) -> Logits:
        """Return a row of logits after the processors."""
        if self._processor is None:
            return row
        try:
            scores = np.asarray(self._processor(tokens, row), np.float32)
            if scores.shape != row.shape:
                raise LibraryError(f"logits_processor returned an array of shape {scores.shape}, not {row.shape}")
            if not float(scores.max()) < math.inf:
                raise LibraryError("logits_processor returned scores that are not numbers")
        except Exception as error:
            self.error = error
            raise
        return scores if scores.flags.writeable else scores.copy()

    def _until(self, tokens: TokenArray, row: Logits) -> bool:
        assert self._criteria is not None
        try:
            return bool(self._criteria(tokens, row.copy()))
        except Exception as error:
            self.error = error
            raise


def _combine(name: str, given: object, lists: Any) -> Callable[..., Any] | None:
    if given is None or given is False:
        return None
    if callable(given):  # also a LogitsProcessorList or StoppingCriteriaList
        return given
    if isinstance(given, Iterable) and all(map(callable, functions := list(given))):
        made: Callable[..., Any] = lists(functions)
        return made if functions else None
    raise LibraryError(f"{name} must be a function of (input_ids, scores), or a list of such functions")
