"""What a model is given at a time: the sizes a graph is built for, and the contents its inputs are filled from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FEATURES = "features"
"""The name of the graph's output with hidden states for one who drafts."""


class Output(Enum):
    """What a forward pass gives for a row: LOGITS, the hidden state after the last norm, or a classifier's SCORES."""

    LOGITS = "logits"
    HIDDEN = "hidden"
    SCORES = "scores"


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The sizes a graph is built for: tokens computed, rows that are given out, cells of the cache that attention
    reads; what is given out; how strong each of the model's adapters is (none given: all 0); and whether embeddings
    come in the place of tokens.

    `features`: of which points between layers hidden states are given out, of all tokens, for one who drafts: i is the
    input of layer i, n_layer what comes behind the last one, n_layer + 1 what comes behind the last norm. `given`: of a
    model that drafts, numbers of the hidden state that comes with each token; `stage`: which of its heads predicts.

    `n_outputs` may be 0: a chunk of a prompt that only fills the cache. `n_seqs`: where layers remember states, how
    many sequences the tokens are of, each of which has as many; elsewhere 0.
    """

    n_tokens: int
    n_outputs: int
    n_kv: int
    output: Output = Output.LOGITS
    scales: tuple[float, ...] = ()
    embeddings: bool = False
    n_seqs: int = 0
    features: tuple[int, ...] = ()
    given: int = 0
    stage: int = 0

    def __post_init__(self) -> None:
        if self.n_tokens < 1 or not 0 <= self.n_outputs <= self.n_tokens or self.n_kv < 1:
            raise ValueError(f"not a batch: {self}")
        if self.n_seqs and self.n_tokens % self.n_seqs:
            raise ValueError(f"sequences of unequal length: {self}")


class Stretch(NamedTuple):
    """Rows `row` to `row + n` of a memory, which hold so many tokens of a sequence in the order of their positions."""

    row: int
    n: int


class Beginning(NamedTuple):
    """Where the first tokens of a sequence lie, apart from those behind: the tokens `start` to `stop` of a batch see
    them, as those of other sequences may. Their rows ascend.
    """

    start: int
    stop: int
    stretches: tuple[Stretch, ...]

    @property
    def n(self) -> int:
        """How many tokens they are."""
        return sum(stretch.n for stretch in self.stretches)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRows:
    """What a batch does in one part of a model's memory: token i is written to row `written[i]` and sees rows
    `first[i]` to `last[i]`. All are int64 [n].

    Where states are remembered, of each sequence: it goes on from that of row `first[i]`, and leaves its own in row
    `written[i]`. All are int64 [n_seqs].

    `spare`: a row that no token sees, for what fills a batch up. `beginnings`: of those sequences of the batch whose
    first tokens lie elsewhere, below row `first[i]`.
    """

    written: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    spare: int
    beginnings: tuple[Beginning, ...] = ()

    @property
    def origins(self) -> NDArray[np.int64]:
        """For each token the row at which its sequence would begin if all of it lay together; perhaps below 0."""
        if not self.beginnings:
            return self.first
        origins = self.first.copy()
        for beginning in self.beginnings:
            origins[beginning.start : beginning.stop] -= beginning.n
        return origins


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tokens to be evaluated together, of one sequence or of many.

    `positions`: int32 [n], the place of each token in its sequence, or [4, n] where places have several dimensions;
    `outputs`: int32, the rows that are given out, ascending; `memory`: for each part of the model's memory; `tokens`:
    int32 [n], or where there are none `embeddings`: float32 [n, n_embd]. `n_seqs`: see BatchShape. `given`: float32
    [n, BatchShape.given], for a model that drafts. `before`: int32 [n, k], the k tokens before each one in its
    sequence, -1 where there is none, for models that look back.
    """

    positions: NDArray[np.integer]
    outputs: NDArray[np.integer]
    memory: tuple[MemoryRows, ...]
    tokens: NDArray[np.integer] | None = None
    embeddings: NDArray[np.float32] | None = None
    n_seqs: int = 0
    given: NDArray[np.float32] | None = None
    before: NDArray[np.int32] | None = None

    @property
    def n_tokens(self) -> int:
        return int(self.positions.shape[-1])
