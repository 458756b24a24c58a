"""A sequence in a memory, its next tokens in a batch, and where a batch lies there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.models.batch import MemoryRows
from llamado.models.memory.run import Run
from llamado.models.memory.states import StatePlace
from llamado.models.memory.window import WindowPlace


class Handle:
    """A sequence in a memory; `used` of its tokens were read."""

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
        """Tokens that it must have room for, which others cannot have."""
        return self.run.need

    @need.setter
    def need(self, n: int) -> None:
        self.run.need = n

    @property
    def capacity(self) -> int:
        """Tokens that it has room for."""
        return self.run.limit

    def __repr__(self) -> str:
        return f"Handle({self.run})"


class Span(NamedTuple):
    """The next `n` tokens of a sequence in a batch: those from position `first` on.

    The last `on_trust` tokens before them are on their way, and may turn out not to be the sequence's. `before`:
    the last of the tokens before them, `Memory.n_before` or all there are, where the model looks back at them.
    """

    handle: Handle
    first: int
    n: int
    on_trust: int = 0
    before: Sequence[int] | NDArray[np.int32] = ()


def windows_before(tokens: NDArray[np.int32], spans: Sequence[Span], n: int) -> NDArray[np.int32]:
    """The `n` tokens before each one of a batch in its sequence, -1 where there is none: int32 [n_tokens, n].

    Raises ValueError for a span that does not say what came before it.
    """
    found = np.empty((len(tokens), n), np.int32)
    at = 0
    for span in spans:
        known = min(n, span.first)
        if len(span.before) < known:
            raise ValueError(f"{known} tokens before position {span.first} are needed, and {len(span.before)} given")
        before = [*[-1] * (n - known), *span.before[len(span.before) - known :]]
        line = np.concatenate([np.array(before, np.int32), tokens[at : at + span.n]])
        found[at : at + span.n] = np.lib.stride_tricks.sliding_window_view(line, n)[: span.n]
        at += span.n
    return found


class Placed(NamedTuple):
    """A batch in a memory, or one of those that it is divided into: the position of each token, and where it is in
    each part. `tokens`: which tokens of the whole these are, ascending; None: all. `n_seqs`: see BatchShape.
    """

    positions: NDArray[np.int32]
    rows: tuple[MemoryRows, ...]
    tokens: NDArray[np.int64] | None = None
    n_seqs: int = 0
