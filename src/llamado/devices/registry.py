"""Registry of device kinds, each implemented by one back end.

A device's name is `KIND://PLACE`, or the kind alone if it needs no place: "cpu", "rpc://10.0.0.2:50052". Each back end
defines the form of its places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

from llamado.devices.device import Device, DeviceError
from llamado.gguf.types import TensorType

_LOCAL_KINDS = {
    "cpu": "llamado.devices.cpu.backend:CpuBackend",
    "cuda": "llamado.devices.cuda.backend:CudaBackend",
}
"""Kinds on this machine, which need no place."""

_REMOTE_KINDS = {
    "rpc": "llamado.rpc.client.workers:Workers",
}
"""Kinds at network places. Values of both tables: a class with the interface of `Backend`, made of places and options
and imported on first use.
"""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Options of back ends; each back end uses those it supports."""

    n_threads: int | None = None
    """Threads that serve small batches (None: one per core)."""
    n_threads_batch: int | None = None
    """Threads that serve larger ones (None: as many)."""
    numa: str | None = None
    """Thread pinning on NUMA machines: "distribute", "isolate" or "numactl"."""
    files: Sequence[Path] = ()
    """Files the weights are from: a back end that sends weights may cache their hashes until the next start."""
    ca: str | None = None
    """PEM files: the trusted authorities, and our own certificate with its key."""
    cert: str | None = None
    key: str | None = None
    connect_timeout: float = 5.0
    """Most seconds for reaching a place."""
    alive_timeout: float = 2.0
    """Seconds without a heartbeat after which a remote device is lost."""
    links: bool = True
    """True if remote devices may pass tensors directly to each other."""


class Unreachable(NamedTuple):
    """A place that cannot be reached, and the reason."""

    where: str
    why: str


WaitCallback = Callable[[Sequence[Unreachable]], None]
"""Callback: called with the places that are waited for whenever they change; at last with an empty list."""


class Backend(Protocol):
    """The devices of one kind at some places."""

    def connect(self, timeout: float | None = None) -> Sequence[Sequence[Device] | Unreachable]:
        """Connect to all places at the same time, within about `timeout` seconds (None: the options' timeout). Return
        the devices of each place.
        """

    def devices(self, wait: float = 0.0, waiting: WaitCallback | None = None) -> Sequence[Device]:
        """Return the devices of all places, and wait up to `wait` seconds for places that cannot be reached.

        Raises a LlamadoError that names the places that are still unreachable.
        """

    def reconnect(self, lost: Device, timeout: float = 2.0) -> Device:
        """Open a new device in place of a lost one, under the same name. Raises `DeviceLost` while there is none."""

    def expect_answers(self, seconds: float | None) -> None:
        """Drop devices that take longer than `seconds` to answer from now on; None: no limit, for slow graphs."""

    def open(self, place: str) -> Sequence[Device]:
        """Return the devices of one more place, which the caller names. Raises a LlamadoError."""

    def add(self, place: str, devices: Sequence[Device]) -> None:
        """Add the devices of an opened place to those that are reconnected after a loss."""

    def remove(self, place: str) -> None:
        """Remove a place: its devices are not connected again. An unknown place is ignored."""

    def weight_types(self) -> frozenset[TensorType] | None:
        """Types of weights that its devices have kernels for; None if only the devices can tell."""


class LocalBackend:
    """Base of back ends for devices of this machine: they are opened at once, and no place joins or leaves."""

    def devices(self, wait: float = 0.0, waiting: WaitCallback | None = None) -> Sequence[Device]:
        raise NotImplementedError

    def connect(self, timeout: float | None = None) -> Sequence[Sequence[Device]]:
        return [self.devices()]

    def expect_answers(self, seconds: float | None) -> None:
        pass

    def add(self, place: str, devices: Sequence[Device]) -> None:
        pass

    def remove(self, place: str) -> None:
        pass

    def weight_types(self) -> frozenset[TensorType]:
        from llamado.devices.kernels.formats import FORMATS

        return frozenset(FORMATS)


def local_kinds() -> tuple[str, ...]:
    """Return the device kinds of this machine."""
    return tuple(_LOCAL_KINDS)


def backend(kind: str, places: Sequence[str] = (), options: DeviceOptions | None = None) -> Backend:
    """Make the back end of a kind without opening devices. Raises `DeviceError` for an unknown kind."""
    known = _LOCAL_KINDS | _REMOTE_KINDS
    if kind not in known:
        raise DeviceError(f"there is no kind of device called {kind!r}; known are {', '.join(known)}")
    module, _, name = known[kind].partition(":")
    made: Backend = getattr(import_module(module), name)(places, options or DeviceOptions())
    return made


def open_device(name: str, options: DeviceOptions | None = None) -> Device:
    """Open the first device of a name. Raises `DeviceError` for an unknown kind, and the errors of its back end."""
    kind, _, where = name.partition("://")
    return backend(kind.lower(), (where,) if where else (), options).devices()[0]
