"""What a model is given at a time: the sizes a graph is built for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Output(Enum):
    """What a forward pass gives for a row: LOGITS, the hidden state after the last norm, or a classifier's SCORES."""

    LOGITS = "logits"
    HIDDEN = "hidden"
    SCORES = "scores"


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The sizes a graph is built for: tokens computed, rows that are given out, cells of the cache that attention
    reads; what is given out; and how strong each of the model's adapters is (none given: all 0).

    `n_outputs` may be 0: a chunk of a prompt that only fills the cache.
    """

    n_tokens: int
    n_outputs: int
    n_kv: int
    output: Output = Output.LOGITS
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.n_tokens < 1 or not 0 <= self.n_outputs <= self.n_tokens or self.n_kv < 1:
            raise ValueError(f"not a batch: {self}")
