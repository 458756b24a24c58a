"""Where devices come from: each kind is one back end, and a line here.

A device's name is `KIND://WHERE`, or the kind alone where there is nothing to add: "cpu", "rpc://10.0.0.2:50052". What
WHERE may be is the back end's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

from llamado.devices.device import Device, DeviceError
from llamado.gguf.types import TensorType

_HERE = {
    "cpu": "llamado.devices.cpu.backend:CpuBackend",
}
"""Kinds of this machine: they need no WHERE."""

_ELSEWHERE = {
    "rpc": "llamado.rpc.client.workers:Workers",
}
"""Kinds that are reached somewhere. Here as above: a class that is a Backend made of places and options, imported when
it is asked for.
"""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """What back ends are told; each takes what it knows of."""

    n_threads: int | None = None
    """Threads that serve small batches (None: one per core)."""
    n_threads_batch: int | None = None
    """Threads that serve larger ones (None: as many)."""
    numa: str | None = None
    """Where threads run on machines with several memory nodes: "distribute", "isolate" or "numactl"."""
    files: Sequence[Path] = ()
    """Files that the weights are from: who sends weights may keep what it knows of them until the next start."""
    ca: str | None = None
    """Files of certificates: of the authorities that are trusted, and one's own with its key."""
    cert: str | None = None
    key: str | None = None
    connect_timeout: float = 5.0
    """Seconds that reaching a place may take."""
    alive_timeout: float = 2.0
    """Seconds without a sign of life after which a device elsewhere is lost."""
    links: bool = True
    """Whether devices elsewhere may pass tensors to each other."""


class Unreachable(NamedTuple):
    """A place that does not answer, and why."""

    where: str
    why: str


Waiting = Callable[[Sequence[Unreachable]], None]
"""Is told which places are waited for, whenever that changes; at last of none."""


class Backend(Protocol):
    """The devices of one kind at some places."""

    def connect(self, timeout: float | None = None) -> Sequence[Sequence[Device] | Unreachable]:
        """The devices of each place, all reached at the same time within about `timeout` seconds (None: as the
        options say).
        """

    def devices(self, wait: float = 0.0, waiting: Waiting | None = None) -> Sequence[Device]:
        """The devices of all places, of which those that do not answer are waited for `wait` seconds.

        Raises a LlamadoError that names those that do not answer even then.
        """

    def reconnect(self, lost: Device, timeout: float = 2.0) -> Device:
        """A new device in the place of a lost one, under its name. Raises DeviceLost while there is none."""

    def expect_answers(self, seconds: float | None) -> None:
        """Lose devices whose answers take longer from now on; None: as usual, for graphs may take long."""

    def open(self, place: str) -> Sequence[Device]:
        """Return the devices of one more place, whose names are for the caller to set. Raises a LlamadoError."""

    def add(self, place: str, devices: Sequence[Device]) -> None:
        """Connect the devices of an opened place again from now on when they are lost."""

    def remove(self, place: str) -> None:
        """A place whose devices are not connected again; one that is not known is ignored."""

    def weight_types(self) -> frozenset[TensorType] | None:
        """Types of weights that its devices have kernels for; None where only they can tell."""


def kinds_here() -> tuple[str, ...]:
    """The kinds that this machine may have."""
    return tuple(_HERE)


def backend(kind: str, places: Sequence[str] = (), options: DeviceOptions | None = None) -> Backend:
    """The back end of a kind; nothing is opened yet. Raises DeviceError for an unknown kind."""
    known = _HERE | _ELSEWHERE
    if kind not in known:
        raise DeviceError(f"there is no kind of device called {kind!r}; known are {', '.join(known)}")
    module, _, name = known[kind].partition(":")
    made: Backend = getattr(import_module(module), name)(places, options or DeviceOptions())
    return made


def open_device(name: str, options: DeviceOptions | None = None) -> Device:
    """The first device of a name. Raises DeviceError for an unknown kind, and what its back end raises."""
    kind, _, where = name.partition("://")
    return backend(kind.lower(), (where,) if where else (), options).devices()[0]
