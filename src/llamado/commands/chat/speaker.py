"""Who answers in a conversation: a model in this process or a server, and what of an answer the terminal is told."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]
"""`role` and `content`, as in OpenAI's chats; of the assistant perhaps `reasoning_content`."""


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of an answer."""

    text: str
    thought: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is known of a whole answer; None: nobody said."""

    n_prompt: int | None = None
    n_cached: int | None = None
    """Tokens of the prompt that were not computed anew."""
    n_predicted: int | None = None
    tokens_per_second: float | None = None
    first_seconds: float | None = None
    """From the question to the first piece."""
    cut: bool = False
    """Whether it ended because it became too long."""


Answer = Generator[Said, None, Figures]


class Speaker(Protocol):
    """Answers conversations, one at a time."""

    name: str
    notes: Sequence[str]
    """What a user should know before the first question."""

    def answer(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> Answer:
        """The next message, in pieces, with the parameters of the table that are set, by their names.

        Closing the generator ends the answer. Raises LlamadoError.
        """
        ...

    def close(self) -> None:
        """Let go of model or connection."""
        ...
