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

if TYPE_CHECKING:
    from llamado.engine.request import Away
    from llamado.models.memory import Memory, Span

Scales = tuple[float, ...]
"""How strong each of a model's adapters is, in float32; none at all where all of them are 0."""


class Activated(tuple[float, ...]):
    """Scales of an adapter that works from token `start` of a sequence on, as activated LoRAs do; none does before."""

    start: int

    def __new__(cls, scales: Scales, start: int) -> Activated:
        """`start`: 1 or more."""
        self = super().__new__(cls, scales)
        self.start = start
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Activated) and self.start == other.start and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((*self, self.start))

    def __repr__(self) -> str:
        return f"Activated({super().__repr__()}, {self.start})"


def scales_at(scales: Scales, token: int) -> Scales:
    """Those that a token of a sequence is computed with."""
    if not isinstance(scales, Activated):
        return scales
    return tuple(scales) if token >= scales.start else ()


def alike(one: Scales, other: Scales, n: int) -> int:
    """How many of `n` first tokens, which two sequences share, are computed alike."""
    return n if one == other else min(n, _without(one, n), _without(other, n))


def _without(scales: Scales, n: int) -> int:
    """How many of `n` first tokens no adapter has to do with."""
    return scales.start if isinstance(scales, Activated) else 0 if scales else n


Cells = NDArray[np.uint8]
"""Bytes of tokens in a memory, as `Memory.read` gives them."""


# Bytes of cells that are moved between two steps, and cells of a piece at most.
_PIECE_BYTES, _PIECE_CELLS = 8 << 20, 256


def piece_cells(cell_bytes: int) -> int:
    """How many cells are moved at a time."""
    return max(1, min(_PIECE_CELLS, _PIECE_BYTES // max(1, cell_bytes)))


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
    """What the bytes of sequences mean: they are of use only where all of this is the same."""

    model: bytes
    """32 bytes that tell models apart (see fingerprint.py)."""
    memory: Memory
    """Only its kind counts."""
    scales: Scales = ()
    """Of the adapters they were computed with."""


class Forward(Protocol):
    """A model, its weights and its memory of sequences.

    The bits of a row of logits depend on the tokens of that row's sequence alone. Batches are worked on in the order
    in which they are started; one may be started before those ahead of it are done, also one that needs what they
    leave in the memory.
    """

    n_vocab: int
    max_batch: int
    """Most tokens in one batch."""
    features_width: int
    """Numbers of a token's hidden states, where some are given out."""

    @property
    def memory(self) -> Memory:
        """Of the engine's thread alone. What it reads and writes is as it is after all batches started so far."""
        ...

    @property
    def depth(self) -> int:
        """How many batches it pays to have on their way at the same time: 1 on one device."""
        ...

    @property
    def launches(self) -> bool:
        """Whether `start` returns while a batch of this machine is computed, and never when it is done."""
        ...

    @property
    def chunk(self) -> int:
        """How many tokens of prompts are best put into one batch."""
        ...

    def start(
        self,
        tokens: NDArray[np.int32],
        spans: Sequence[Span],
        outputs: NDArray[np.int32],
        *,
        scales: Scales = (),
        features: NDArray[np.float32] | None = None,
        given: NDArray[np.float32] | None = None,
        stage: int = 0,
    ) -> Future[NDArray[np.float32]]:
        """Evaluate tokens; logits `[len(outputs), n_vocab]`, valid until the next batch is started.

        `spans`: whose they are, one after the other; each goes on where its sequence is (`Handle.used`), which is for
        the caller to move on. `outputs`: the rows that get logits, ascending. `scales`: how strong adapters are. The
        arrays may change once this returns, but `features`: `[len(tokens), features_width]`, which has the tokens'
        hidden states when the future is done. `given`, `stage`: what a model which drafts takes with each token, and
        which of its heads predicts; its `features` are those of the outputs. The future fails with DeviceLost when a
        device is gone: all sequences are void then, and nothing can be started until `restore` has succeeded.
        """
        ...

    def prepare_ahead(self) -> bool:
        """Use spare time, some milliseconds of it, for what later batches will need; False when nothing is left."""
        ...

    def cell_kind(self, scales: Scales = ()) -> CellKind:
        """What the bytes of sequences mean that were computed with adapters of this strength; any thread.

        The first call reads a little of every tensor.
        """
        ...

    @property
    def numerics(self) -> str | None:
        """What bits depend on besides: the devices that layers are on now. None where one does not say what it is."""
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
