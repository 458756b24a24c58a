"""Options of a model's forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamado.devices.device import Device
from llamado.engine.observed import ProductObserver
from llamado.models.batch import Output
from llamado.models.memory import MemoryOptions

if TYPE_CHECKING:
    from llamado.devices.split.placement import Placement

Reconnect = Callable[[Device], Device]
"""Open a new device in place of a lost one; raises DeviceLost while that is impossible."""
Replace = Callable[["Placement", Sequence[int]], "Placement"]
"""Return a placement on the devices of these numbers only; raises DeviceError if they have no room."""


@dataclass(frozen=True, kw_only=True)
class RunnerOptions(MemoryOptions):
    """Options of a `ModelRunner`: its memory of sequences, its results, and its treatment of lost devices."""

    output: Output = Output.LOGITS
    """Results of batches: logits, or the numbers of an embedding."""
    features: tuple[int, ...] = ()
    """Layers whose hidden states are returned, too (see BatchShape)."""
    embeddings: bool = False
    """True if batches may have embeddings of media instead of tokens."""
    observer: ProductObserver | None = None
    """Adds outputs to graphs, for `ModelRunner.read`; everything must be on one device."""
    mlock: bool = False
    """True to lock the weights on this machine in RAM, with a warning if the OS refuses."""
    reconnect: Reconnect | None = None
    replace: Replace | None = None
    wait: float = 0.0
    """Seconds to wait for devices that are lost while the model is loaded."""
