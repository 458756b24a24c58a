"""Chat backend contract: a model in this process or a server that answers messages in pieces."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]
"""`role` and `content`, as in OpenAI's API; messages of the assistant may have `reasoning_content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """Statistics of an answer; None: unknown."""

    n_prompt: int | None = None
    n_cached: int | None = None
    """Prompt tokens reused from the cache."""
    n_predicted: int | None = None
    tokens_per_second: float | None = None
    first_seconds: float | None = None
    """Seconds from the question to the first piece."""
    cut: bool = False
    """True if the answer ended at its token limit."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer."""

    text: str
    is_reasoning: bool = False
    so_far: AnswerStats | None = field(default=None, compare=False)
    """Statistics of the answer up to this piece, which count if the user stops it."""


def partial_stats(n_predicted: int, began: float, first: float, n_prompt: int | None = None) -> AnswerStats:
    """Return the statistics of an answer so far.

    `began`, `first`: `time.perf_counter()` at the question and at the first piece.
    """
    now = time.perf_counter()
    speed = (n_predicted - 1) / (now - first) if n_predicted > 1 and now > first else None
    return AnswerStats(n_prompt=n_prompt, n_predicted=n_predicted, tokens_per_second=speed, first_seconds=first - began)


Answer = Generator[AnswerPiece, None, AnswerStats]


class ChatBackend(Protocol):
    """Answers messages, one request at a time."""

    name: str
    notes: Sequence[str]
    """Lines to show before the first question."""

    def answer(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> Answer:
        """Generate the next message in pieces. `settings`: request parameters by name.

        Closing the generator stops the answer. Raises LlamadoError.
        """
        ...

    def close(self) -> None:
        """Release the model or connection."""
        ...
