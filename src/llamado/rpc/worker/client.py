"""The records that the handlers of a session share: the worker's state, and one client of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamado.rpc import wire
from llamado.rpc.worker.activity import WorkDone
from llamado.rpc.worker.budgets import Budgets
from llamado.rpc.worker.connection import ClientConnection
from llamado.rpc.worker.greetings import Greetings
from llamado.rpc.worker.identity import identity
from llamado.rpc.worker.links import Dialer, Inlet
from llamado.rpc.worker.memory import SharedDevice
from llamado.rpc.worker.weights.own_files import OwnFiles
from llamado.rpc.worker.weights.tensor_cache import TensorCache


@dataclass
class WorkerState:
    """State of a worker that all its clients share."""

    devices: Sequence[SharedDevice]
    cache: TensorCache | None = None
    is_debugging: bool = False
    kernels: Budgets = field(default_factory=Budgets)
    dialer: Dialer = field(default_factory=Dialer)
    greetings: Greetings = field(default_factory=lambda: Greetings(wire.DEFAULT_GREETING))
    inlets: dict[bytes, Inlet] = field(default_factory=dict)
    """Inlets of all clients, by ticket."""
    files: OwnFiles | None = None
    may_connect: Callable[[str], bool] = lambda host: True
    """Returns True if a host may connect."""
    is_stopping: bool = False


class Client:
    """One client of a worker, for the handlers of its requests.

    `identity` names the client for budgets and caches. `is_gone`: it has hung up, so no result is needed any more.
    """

    def __init__(self, connection: ClientConnection, worker: WorkerState) -> None:
        self.connection, self.worker = connection, worker
        self.name = connection.name
        self.network = identity(connection.host)
        """The client's network: its identity without a certificate."""
        self.identity = self.network
        self.work = WorkDone()
        self.is_gone = False
        self.computed_s = 0.0
        """Seconds of the last graph."""

    def identify(self) -> None:
        """Take the identity from the client's certificate, if TLS has checked one."""
        self.identity = identity(self.connection.host, self.connection.sock)

    @property
    def is_ending(self) -> bool:
        """True once the client has hung up or its connection was shut."""
        return self.is_gone or self.connection.is_shut

    def device(self, number: int) -> SharedDevice:
        """Return one of the worker's devices. Raises WireError."""
        devices = self.worker.devices
        if number >= len(devices):
            raise wire.WireError(f"device {number} of {len(devices)}")
        return devices[number]
