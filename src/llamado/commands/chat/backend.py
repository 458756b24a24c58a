"""Chat backend contract: a model in this process or a server that answers messages in pieces."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]
"""`role` and `content`, as in OpenAI's API; messages of the assistant may have `reasoning_content`."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer."""

    text: str
    is_reasoning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """Statistics of a complete answer; None: unknown."""

    n_prompt: int | None = None
    n_cached: int | None = None
    """Prompt tokens reused from the cache."""
    n_predicted: int | None = None
    tokens_per_second: float | None = None
    first_seconds: float | None = None
    """Seconds from the question to the first piece."""
    cut: bool = False
    """True if the answer ended at its token limit."""


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
