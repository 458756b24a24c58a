"""Model inputs: the sizes a graph is built for, and the batch contents that fill its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_TOKEN, NOT_TEXT = -1, -2
"""Ids of tokens before a token (see Batch.before): of none, and of one that has an embedding instead of an id."""
FEATURES = "features"
"""Name of the graph output with hidden states for a draft head."""


class Output(Enum):
    """Output rows of a forward pass: LOGITS, the HIDDEN state after the last norm, or a classifier's SCORES."""

    LOGITS = "logits"
    HIDDEN = "hidden"
    SCORES = "scores"


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sizes and options a graph is built for.

    `n_tokens` tokens are computed and `n_outputs` of their rows are output as `output`; 0 for a chunk of a prompt that
    only fills the cache. Attention reads the first `n_kv` cells of the cache. `scales` are the strengths of the model's
    adapters (missing ones: 0). With `embeddings` the batch has embeddings instead of tokens. `n_seqs` is the number of
    sequences, all with the same number of tokens, if layers have recurrent state; otherwise 0.

    `features` selects the hidden states of all tokens that are output for a draft head: i is the input of layer i,
    n_layer the output of the last layer, n_layer + 1 the output of the last norm. For a draft head, `hidden_width` is
    the width of the hidden state that comes with each token, and `stage` the prediction block to run.
    """

    n_tokens: int
    n_outputs: int
    n_kv: int
    output: Output = Output.LOGITS
    scales: tuple[float, ...] = ()
    embeddings: bool = False
    n_seqs: int = 0
    features: tuple[int, ...] = ()
    hidden_width: int = 0
    stage: int = 0

    def __post_init__(self) -> None:
        if self.n_tokens < 1 or not 0 <= self.n_outputs <= self.n_tokens or self.n_kv < 1:
            raise ValueError(f"not a batch: {self}")
        if self.n_seqs and self.n_tokens % self.n_seqs:
            raise ValueError(f"sequences of unequal length: {self}")


class RowRange(NamedTuple):
    """Rows `row` to `row + n` of a memory, holding `n` consecutive tokens of a sequence."""

    row: int
    n: int


class PrefixRows(NamedTuple):
    """Rows of a sequence's first tokens, if they are apart from the rest: other sequences may share them.

    Tokens `start` to `stop` of a batch see them. Their rows ascend.
    """

    start: int
    stop: int
    row_ranges: tuple[RowRange, ...]

    @property
    def n(self) -> int:
        """Return the number of tokens."""
        return sum(row_range.n for row_range in self.row_ranges)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRows:
    """Rows that a batch uses in one part of a model's memory.

    Token i is written to row `written[i]` and sees rows `first[i]` to `last[i]`; all are int64 [n]. For recurrent
    state, each sequence continues from the state in row `first[i]` and stores its own in row `written[i]`; all are
    int64 [n_seqs].

    `spare` is a row that no token sees, for the padding of a batch. `prefixes` are the rows of first tokens below row
    `first[i]`, for the sequences that have such.
    """

    written: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    spare: int
    prefixes: tuple[PrefixRows, ...] = ()

    @property
    def origins(self) -> NDArray[np.int64]:
        """Return, per token, the row at which its sequence would start if it were contiguous; may be negative."""
        if not self.prefixes:
            return self.first
        origins = self.first.copy()
        for prefix in self.prefixes:
            origins[prefix.start : prefix.stop] -= prefix.n
        return origins


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tokens evaluated together, of one sequence or several.

    `positions`: int32 [n], each token's position in its sequence, or [4, n] for multi-dimensional positions. `outputs`:
    int32, the output rows, ascending. `memory`: the rows used in each part of the model's memory. `tokens`: int32 [n],
    or `embeddings`: float32 [n, Model.n_embd_input]. `n_seqs`: see BatchShape. `hidden_states`: float32 [n,
    BatchShape.hidden_width], for a draft head. `before`: int32 [n, k], the k tokens before each token in its sequence,
    or NO_TOKEN or NOT_TEXT, for models that need them.
    """

    positions: NDArray[np.integer]
    outputs: NDArray[np.integer]
    memory: tuple[MemoryRows, ...]
    tokens: NDArray[np.integer] | None = None
    embeddings: NDArray[np.float32] | None = None
    n_seqs: int = 0
    hidden_states: NDArray[np.float32] | None = None
    before: NDArray[np.int32] | None = None

    @property
    def n_tokens(self) -> int:
        return int(self.positions.shape[-1])
