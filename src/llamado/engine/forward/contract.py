"""What the engine asks of whatever computes logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceLost
from llamado.errors import LlamadoError
from llamado.gguf.types import TensorType

if TYPE_CHECKING:
    from llamado.engine.request import Away

Scales = tuple[float, ...]
"""How strong each of a model's adapters is, in float32; none at all where all of them are 0."""

Cells = NDArray[np.uint8]
"""Bytes of `n` cells: for each layer K of all of them, then V of all of them."""


def as_scales(numbers: Iterable[float]) -> Scales:
    """Numbers in float32, none at all where all are 0; raises ValueError for those that it cannot hold."""
    with np.errstate(over="ignore"):
        scales = tuple(float(np.float32(number)) for number in numbers)
    if not all(map(math.isfinite, scales)):
        raise ValueError("the scale of a LoRA adapter must be a number that a float32 can hold")
    return scales if any(scales) else ()


class ForwardError(LlamadoError):
    """A forward pass failed."""


class CellKind(NamedTuple):
    """What the bytes of cells mean: they are of use only where all of this is the same."""

    model: bytes
    """32 bytes that tell models apart (see fingerprint.py)."""
    type_k: TensorType
    type_v: TensorType
    rows: tuple[tuple[int, int], ...]
    """Bytes of K and of V in one cell, for each layer."""
    scales: Scales = ()
    """Of the adapters they were computed with."""

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell in all layers."""
        return sum(k + v for k, v in self.rows)


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
    cell_bytes: int
    """Bytes of one cell in all layers."""

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
        *,
        scales: Scales = (),
    ) -> Future[NDArray[np.float32]]:
        """Evaluate `n` tokens; logits `[len(outputs), n_vocab]`, valid until the next batch is started.

        Token i is written to KV cell `starts[i] + positions[i]` and attends to cells from `starts[i]` up to its own.
        Tokens of several sequences may be mixed, those of one sequence are in order. `outputs`: the rows that get
        logits, ascending. `scales`: how strong adapters are. The arrays may change once this returns. The future fails
        with DeviceLost when a device is gone: all cells are void then, and nothing can be started until `restore` has
        succeeded.
        """
        ...

    def prepare_ahead(self) -> bool:
        """Use spare time, some milliseconds of it, for what later batches will need; False when nothing is left."""
        ...

    def copy_cells(self, src: int, dst: int, n: int) -> None:
        """Copy K and V of all layers from `n` cells at `src` to those at `dst`; the ranges may overlap (memmove)."""
        ...

    def cell_kind(self, scales: Scales = ()) -> CellKind:
        """What the bytes of cells mean that were computed with adapters of this strength; any thread.

        The first call reads a little of every tensor.
        """
        ...

    def read_cells(self, start: int, n: int) -> Cells:
        """Bytes of K and V of all layers from `n` cells at `start`, as they are after all batches started so far.

        Raises DeviceLost, and whatever made one of those batches fail.
        """
        ...

    def write_cells(self, start: int, n: int, cells: Cells) -> None:
        """Put the first `n` of these cells (`read_cells` gave them) at `start`. Raises DeviceLost."""
        ...

    def sound_cells(self, cells: Cells, n: int) -> bool:
        """Whether bytes from elsewhere can be `n` cells: numbers, and such that no sum over them overflows."""
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

    def away(self) -> Sequence[Away]:
        """Devices whose layers went elsewhere."""
        ...

    def call_back(self) -> None:
        """One attempt, while batches go on and from a thread of its own, to reach those devices and give them weights.

        When it returns there is something for `move_back`. Raises DeviceLost while none of them is there.
        """
        ...

    def move_back(self) -> None:
        """Devices that were called back have their layers again; all cells are void then, as after `restore`.

        Raises DeviceLost where one of them is gone again: then all is as it was, or `lost` tells what else is gone.
        """
        ...
