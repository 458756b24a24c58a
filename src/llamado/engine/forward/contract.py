"""The interface that the engine uses to compute logits."""

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
"""Scales of a model's adapters, in float32; empty if all are 0."""


class ActivatedScales(tuple[float, ...]):
    """Scales of an adapter that applies from token `start` of a sequence on, as for activated LoRAs; no adapter does
    before.
    """

    start: int

    def __new__(cls, scales: Scales, start: int) -> ActivatedScales:
        """`start`: 1 or more."""
        self = super().__new__(cls, scales)
        self.start = start
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActivatedScales) and self.start == other.start and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((*self, self.start))

    def __repr__(self) -> str:
        return f"Activated({super().__repr__()}, {self.start})"


def scales_at(scales: Scales, token: int) -> Scales:
    """Return the scales that a token of a sequence is computed with."""
    if not isinstance(scales, ActivatedScales):
        return scales
    return tuple(scales) if token >= scales.start else ()


def alike(one: Scales, other: Scales, n: int) -> int:
    """Return how many of the `n` first tokens, which two sequences share, are computed with the same scales."""
    return n if one == other else min(n, _without(one, n), _without(other, n))


def _without(scales: Scales, n: int) -> int:
    """Return how many of the `n` first tokens are computed without adapters."""
    return scales.start if isinstance(scales, ActivatedScales) else 0 if scales else n


Cells = NDArray[np.uint8]
"""Bytes of tokens in a memory, as returned by `Memory.read`."""


# most bytes of cells that are moved between two steps, and most cells of a piece
_PIECE_BYTES, _PIECE_CELLS = 8 << 20, 256


def piece_cells(cell_bytes: int) -> int:
    """Return the number of cells to move at a time."""
    return max(1, min(_PIECE_CELLS, _PIECE_BYTES // max(1, cell_bytes)))


def as_scales(numbers: Iterable[float]) -> Scales:
    """Convert numbers to float32, empty if all are 0. Raises ValueError for numbers that float32 cannot hold."""
    with np.errstate(over="ignore"):
        scales = tuple(float(np.float32(number)) for number in numbers)
    if not all(map(math.isfinite, scales)):
        raise ValueError("the scale of a LoRA adapter must be a finite float32 number")
    return scales if any(scales) else ()


class ForwardError(LlamadoError):
    """A forward pass failed."""


class CellKind(NamedTuple):
    """The meaning of the bytes of sequences: they can be used only if all of this is the same."""

    model: bytes
    """32-byte fingerprint of the model (see device_rows.py)."""
    memory: Memory
    """Only its kind counts."""
    scales: Scales = ()
    """Scales of the adapters they were computed with."""


class Recovery(Protocol):
    """Detects the loss of devices and replaces them."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Set a `callback`, called from any thread, for the loss of a device."""
        ...

    def lost(self) -> DeviceLost | None:
        """Return the loss of a device, if one is lost."""
        ...

    def restore(self, elsewhere: bool) -> None:
        """Attempt once to continue: reconnect the lost device, or with `elsewhere` move its layers to the others.

        Raises DeviceLost while it is still gone and DeviceError if the others have no room.
        """
        ...

    def away(self) -> Sequence[Away]:
        """Return the devices whose layers moved to others."""
        ...

    def call_back(self) -> None:
        """Attempt once to reach those devices and send them weights, while batches go on, on a thread of its own.

        On return `move_back` can be called. Raises DeviceLost while all of them are unreachable.
        """
        ...

    def move_back(self) -> None:
        """Move layers back to the reconnected devices; all cells are void then, as after `restore`.

        Raises DeviceLost if one of them is gone again: then everything is unchanged, or `lost` returns a further loss.
        """
        ...


class Forward(Protocol):
    """A model, its weights and its memory of sequences.

    The bits of a row of logits depend only on the tokens of that row's sequence. Batches are computed in the order in
    which they are started. A batch may be started before earlier ones are done, even if it needs their results in the
    memory.
    """

    n_vocab: int
    max_batch: int
    """Most tokens in one batch."""
    features_width: int
    """Width of a token's hidden states, if they are returned."""

    @property
    def memory(self) -> Memory:
        """Used by the engine's thread only. Reads and writes see the state after all batches started so far."""
        ...

    @property
    def depth(self) -> int:
        """Best number of batches in flight: 1 on one device."""
        ...

    @property
    def launches(self) -> bool:
        """True if `start` returns while a batch of this machine is computed, and never when it is done."""
        ...

    @property
    def chunk(self) -> int:
        """Best number of prompt tokens in one batch."""
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
        embeddings: NDArray[np.float32] | None = None,
    ) -> Future[NDArray[np.float32]]:
        """Evaluate tokens; the result is logits `[len(outputs), n_vocab]`, valid until the next batch is started.

        `spans`: the sequences of the tokens, one after the other; each continues its sequence at `Handle.used`, which
        the caller advances. `outputs`: the rows that get logits, ascending. `scales`: of the adapters. The arrays may
        change once this returns, except `features`: `[len(tokens), features_width]`, which has the tokens' hidden
        states when the future is done. `given`, `stage`: a draft head's input for each token, and the number of the
        stage that predicts; its `features` are those of the outputs. `embeddings`: rows that replace the tokens. The
        future fails with DeviceLost when a device is gone: all sequences are void then, and nothing can be started
        until `recovery.restore` has succeeded.
        """
        ...

    def prepare_ahead(self) -> bool:
        """Use some milliseconds of idle time to prepare later batches; return False when nothing is left."""
        ...

    def cell_kind(self, scales: Scales = ()) -> CellKind:
        """Return the meaning of the bytes of sequences that were computed with these adapter scales. Any thread.

        The first call reads a little of every tensor.
        """
        ...

    @property
    def numerics(self) -> str | None:
        """Fingerprint of the devices that layers are on, which the bits depend on, too. None if a device does not
        report it.
        """
        ...

    @property
    def recovery(self) -> Recovery:
        """Recovery from the loss of devices."""
        ...
