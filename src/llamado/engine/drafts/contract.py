"""The interface of a source of draft tokens.

A draft token is evaluated together with the last token of its sequence, and kept only if the sampler would have chosen
it anyway. So no source can change an answer, only the time it takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


class Proposal(NamedTuple):
    """Proposed draft tokens, and the confidence of the source in each.

    A mark is a confidence class that the source defines (number of matching tokens, probability in a model). The
    acceptance rate of each mark is learned (see acceptance.py).
    """

    tokens: list[int]
    marks: list[int]


NO_PROPOSAL = Proposal([], [])


class Drafter(ABC):
    """A source's state for one sequence."""

    @abstractmethod
    def propose(self, history: Sequence[int], ahead: Sequence[int], most: int) -> Proposal:
        """Propose at most `most` tokens to follow `history` and `ahead`.

        `history` are the tokens of the sequence, which only grow until `forget`; `ahead` are draft tokens behind them
        that are still being evaluated.
        """

    @abstractmethod
    def forget(self) -> None:
        """Reset after the sequence was rewritten: `history` is a different one from now on."""

    def end(self, history: Sequence[int], n_prompt: int) -> None:  # noqa: B027
        """End the answer. `history`: all tokens of the sequence, of which the first `n_prompt` are the prompt."""


class DraftKind(ABC):
    """A source of drafts for all sequences of an engine. Only the engine's thread uses it."""

    name: str
    """Its name in `--spec-type` and metrics."""

    @abstractmethod
    def drafter(self) -> Drafter:
        """Make a drafter for another sequence."""

    def first_guess(self, mark: int) -> float:
        """Return the expected acceptance rate of a mark, before any is measured."""
        return 0.5


class Draft:
    """Draft tokens of a sequence in flight, and the number of tokens accepted so far."""

    __slots__ = ("accepted", "kind", "marks", "tokens")

    def __init__(self, kind: int, tokens: list[int], marks: list[int]) -> None:
        self.kind = kind
        """The number of its source."""
        self.tokens = tokens
        self.marks = marks
        self.accepted = 0
