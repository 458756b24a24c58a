"""Sequences in a memory, their tokens in a batch, and the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.models.batch import NO_TOKEN, NOT_TEXT, MemoryRows
from llamado.models.memory.run import Run
from llamado.models.memory.states import StatePlace
from llamado.models.memory.window import WindowPlace


class Handle:
    """A sequence in a memory; `used` is the number of its tokens that were read."""

    __slots__ = ("places", "run")

    def __init__(self, run: Run, places: list[WindowPlace | StatePlace]) -> None:
        self.run = run
        self.places = places

    @property
    def used(self) -> int:
        return self.run.used

    @used.setter
    def used(self, n: int) -> None:
        self.run.used = n

    @property
    def need(self) -> int:
        """Number of tokens whose room is reserved; other sequences cannot take it."""
        return self.run.need

    @need.setter
    def need(self, n: int) -> None:
        self.run.need = n

    @property
    def capacity(self) -> int:
        """Return the number of tokens that fit."""
        return self.run.limit

    def __repr__(self) -> str:
        return f"Handle({self.run})"


class Span(NamedTuple):
    """The next `n` tokens of a sequence in a batch, from position `first` on.

    The last `n_unverified` tokens before them are in flight and unverified. `before`: the last tokens before them,
    `Memory.n_before` or all there are, for models that need them. Each token sees all of the span if it is
    `bidirectional`. `shift` is added to the tokens' numbers to give their positions, unless `positions`, int32 [4, n],
    replace them.
    """

    handle: Handle
    first: int
    n: int
    n_unverified: int = 0
    before: Sequence[int] | NDArray[np.int32] = ()
    bidirectional: bool = False
    shift: int = 0
    positions: NDArray[np.int32] | None = None


def windows_before(tokens: NDArray[np.int32], spans: Sequence[Span], n: int) -> NDArray[np.int32]:
    """Return the `n` tokens before each token of a batch in its sequence: int32 [n_tokens, n]; NO_TOKEN if there is
    none, NOT_TEXT in place of ids below zero.

    Raises ValueError if a span lacks the tokens before it.
    """
    found = np.empty((len(tokens), n), np.int32)
    at = 0
    for span in spans:
        known = min(n, span.first)
        if len(span.before) < known:
            raise ValueError(f"{known} tokens before position {span.first} are needed, and {len(span.before)} given")
        before = [*[NO_TOKEN] * (n - known), *span.before[len(span.before) - known :]]
        line = np.concatenate([np.array(before, np.int32), tokens[at : at + span.n]])
        line[n - known :] = np.where(line[n - known :] < 0, NOT_TEXT, line[n - known :])
        found[at : at + span.n] = np.lib.stride_tricks.sliding_window_view(line, n)[: span.n]
        at += span.n
    return found


class BatchPlacement(NamedTuple):
    """A batch, or one of the batches that it is divided into, placed in a memory: token positions, int32 [n] or [4, n],
    and rows per part.

    `tokens`: indices of these tokens in the whole batch, ascending; None: all. `n_seqs`: see BatchShape.
    """

    positions: NDArray[np.int32]
    rows: tuple[MemoryRows, ...]
    tokens: NDArray[np.int64] | None = None
    n_seqs: int = 0
