"""What the engine asks of whatever computes logits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceLost
from llamado.errors import LlamadoError


class ForwardError(LlamadoError):
    """A forward pass failed."""


class Forward(Protocol):
    """A model, its weights and one pool of KV cells.

    The bits of a row of logits depend on the tokens of that row's sequence alone. Batches are worked on in the order
    in which they are started; one may be started before those ahead of it are done, also one that needs their cells.
    """

    n_vocab: int
    n_cells: int
    """Size of the KV pool, a multiple of 256."""
    max_batch: int
    """Most tokens in one batch."""

    @property
    def depth(self) -> int:
        """How many batches it pays to have on their way at the same time: 1 on one device."""
        ...

    @property
    def chunk(self) -> int:
        """How many tokens of prompts are best put into one batch."""
        ...

    def start(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        starts: NDArray[np.int64],
        outputs: NDArray[np.int32],
    ) -> Future[NDArray[np.float32]]:
        """Evaluate `n` tokens; logits `[len(outputs), n_vocab]`, valid until the next batch is started.

        Token i is written to KV cell `starts[i] + positions[i]` and attends to cells from `starts[i]` up to its own.
        Tokens of several sequences may be mixed, those of one sequence are in order. `outputs`: the rows that get
        logits, ascending. The arrays may change once this returns. The future fails with DeviceLost when a device is
        gone: all cells are void then, and nothing can be started until `restore` has succeeded.
        """
        ...

    def prepare_ahead(self) -> bool:
        """Use spare time, some milliseconds of it, for what later batches will need; False when nothing is left."""
        ...

    def copy_cells(self, src: int, dst: int, n: int) -> None:
        """Copy K and V of all layers from `n` cells at `src` to those at `dst`; the ranges may overlap (memmove)."""
        ...

    def watch(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, from any thread, when a device is lost."""
        ...

    def lost(self) -> DeviceLost | None:
        """The device that is gone, if one is."""
        ...

    def restore(self, elsewhere: bool) -> None:
        """One attempt to get going again: the lost device anew, else with `elsewhere` its layers on the others.

        Raises DeviceLost while it is still gone and DeviceError where the others have no room.
        """
        ...
