"""What a source of drafted tokens is.

A drafted token is evaluated along with the last one of its sequence, and kept only if it is the one that would have
been chosen anyway: no source can change an answer, only the time that it takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


class Proposal(NamedTuple):
    """Tokens that may follow, and how sure the source is of each.

    A mark is a class of its own making (how many tokens agreed, how probable a model finds it); how often tokens of a
    mark are right is learnt (see chances.py).
    """

    tokens: list[int]
    marks: list[int]


NOTHING = Proposal([], [])


class Drafter(ABC):
    """One source's knowledge of one sequence."""

    @abstractmethod
    def propose(self, said: Sequence[int], ahead: Sequence[int], most: int) -> Proposal:
        """What may follow `said` and `ahead`, at most `most` tokens.

        `said` is what the sequence has, which only grows until `forget`; `ahead` are drafted tokens behind it of which
        nobody knows yet whether they are right.
        """

    @abstractmethod
    def forget(self) -> None:
        """The sequence was rewritten: `said` is another one from now on."""

    def learn(self, drafted: int, accepted: int) -> None:  # noqa: B027
        """Of the last proposal so many tokens were evaluated, of which so many were right before the first wrong one.

        It is not told where nobody came to know.
        """

    def end(self, said: Sequence[int], n_prompt: int) -> None:  # noqa: B027
        """The answer is over: what the sequence came to, of which the first `n_prompt` tokens were asked."""


class DraftKind(ABC):
    """A source of drafts for all sequences of an engine; of the engine's thread alone."""

    name: str
    """As `--spec-type` and metrics call it."""

    @abstractmethod
    def drafter(self) -> Drafter:
        """For one sequence more."""

    def first_guess(self, mark: int) -> float:
        """How often tokens of a mark are right, before anything is known."""
        return 0.5


class Draft:
    """Tokens of a sequence that are evaluated on trust, and how many of them turned out right so far."""

    __slots__ = ("accepted", "kind", "marks", "tokens")

    def __init__(self, kind: int, tokens: list[int], marks: list[int]) -> None:
        self.kind = kind
        """The number of its kind."""
        self.tokens = tokens
        self.marks = marks
        self.accepted = 0
