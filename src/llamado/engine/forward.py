"""What the engine asks of whatever computes logits."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.errors import LlamadoError


class ForwardError(LlamadoError):
    """A forward pass failed."""


class Forward(Protocol):
    """A model, its weights and one pool of KV cells.

    The bits of a row of logits depend on the tokens of that row's sequence alone.
    """

    n_vocab: int
    n_cells: int
    """Size of the KV pool, a multiple of 256."""
    max_batch: int
    """Most tokens in one run."""

    def run(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        starts: NDArray[np.int64],
        outputs: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """Evaluate `n` tokens; logits `[len(outputs), n_vocab]`, valid until the next run.

        Token i is written to KV cell `starts[i] + positions[i]` and attends to cells from `starts[i]` up to its own.
        Tokens of several sequences may be mixed, those of one sequence are in order. `outputs`: the rows that get
        logits, ascending.
        """
        ...

    def prepare_ahead(self) -> bool:
        """Use spare time, some milliseconds of it, for what later runs will need; False when nothing is left to do."""
        ...

    def copy_cells(self, src: int, dst: int, n: int) -> None:
        """Copy K and V of all layers from `n` cells at `src` to those at `dst`; the ranges may overlap (memmove)."""
        ...
