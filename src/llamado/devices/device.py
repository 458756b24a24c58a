"""The `Device` contract: an in-order stream of writes, graphs, copies and reads. The engine sees devices only through
it.

A tensor is bound to a device by its `buffer` and `offset`; a tensor without a buffer is an activation, and the device
chooses its place. A device runs what is submitted in order, and a read returns a future.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.errors import LlamadoError
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

Bytes = NDArray[np.uint8]

LoadProgress = Callable[[int], None]
"""Callback: called with the number of weight bytes loaded since the last call."""


class DeviceError(LlamadoError):
    """A device cannot do what was requested: unsupported operation, no memory, or a tensor outside its buffer."""


class DeviceFull(DeviceError):
    """A device has less free memory than an allocation needs."""

    in_logs = "tensor allocation failed"


class DeviceLost(DeviceError):
    """A device is gone with everything it held: a graphics card failed, or a worker (see `WorkerLost`).

    `device` is its name; `Backend.reconnect` may open a new one at the same place.
    """

    kind = "device"

    def __init__(self, device: str, why: str) -> None:
        super().__init__(f"{self.kind} {device} is lost: {why}")
        self.device = device
        self.why = why


class WorkerLost(DeviceLost):
    """A device of another process is gone: its machine or process ended, or the connection broke."""

    in_logs = "RPC connection failed"
    kind = "worker"


class NoKernelsLeft(DeviceError):
    """A graph needs more new kernels than its quota allows; the kernels made so far stay usable."""


class KernelQuota:
    """The number of kernels that may still be made for a graph. Kernels that are loaded already do not count."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self) -> None:
        """Count one kernel that is about to be made. Raise `NoKernelsLeft` if the quota is used up."""
        if self.left <= 0:
            raise NoKernelsLeft("a graph that needs more different kernels than any model does")
        self.left -= 1


class OperationTime(NamedTuple):
    """Seconds a thread spent in an operation, and waiting for other threads before it (means over the threads)."""

    label: str
    work: float
    wait: float


class Address(Protocol):
    """Network location of a device in another process."""

    @property
    def host(self) -> str:
        """Host name or IP address."""


class Buffer(Protocol):
    """Memory of one device."""

    size: int

    @property
    def memory(self) -> Bytes | None:
        """Its bytes, if they are in this process; None for a remote device."""

    def lock(self) -> bool:
        """Lock its pages in RAM, as far as they are on this machine. If the system refuses, log a warning and return
        False.
        """

    def free(self) -> None:
        """Release the memory. Callable from any thread; tensors in the buffer must not be used afterwards."""


class LinkLost(WorkerLost):
    """A transfer between two devices failed, although both may be alive. `device` names the two."""

    def __init__(self, link: str, why: str) -> None:
        super().__init__(link, why)
        self.args = (f"the link {link} is lost: {why}",)


class Arrival(NamedTuple):
    """Bytes that another device passed have arrived. `computed`: seconds that device spent computing them."""

    computed: float


class TensorLink(Protocol):
    """A direct link between two devices, by which tensors move without passing through their caller."""

    @property
    def lost(self) -> LinkLost | None:
        """The failure that closed the link; None while it works."""

    def send(self, source: Tensor, size: int) -> int:
        """Send the first `size` bytes of a bound tensor, as they are after all earlier work on its device. Return the
        sequence number to `receive` them by.
        """

    def receive(self, number: int, target: Tensor, size: int) -> Future[Arrival]:
        """Make the target device wait for the bytes of that sequence number before its later work, and store them in a
        bound tensor. Numbers come in sending order; some may be left out.
        """

    def close(self) -> None:
        """Close the link; neither device waits for the other any more."""


class Device(Protocol):
    """A device that holds tensors and computes graphs.

    Once a remote device is gone, every method and future of it fails with `DeviceLost`. `place`, `memory` and a
    buffer's `free` may be called from any thread, also while a graph runs; everything else from one thread at a time.
    """

    name: str
    """Its name in placements and messages: "CPU", "RPC0[host:port]"."""

    # --- properties ---

    @property
    def local(self) -> bool:
        """True if weights are used in place on this machine: loading them neither sends nor copies anything."""

    @property
    def endpoint(self) -> Address | None:
        """Its network location; None for a device of this process."""

    @property
    def details(self) -> str:
        """A short description for people, such as "2 threads"; may be empty."""

    @property
    def utilization(self) -> float | None:
        """Share of the last moments in which it computed, for any process, from 0 to 1; None if unknown. Any thread."""

    @property
    def zeroes_memory(self) -> bool:
        """True if `place` writes to the memory it allocates. Otherwise all of it may be one shared page until first
        written.
        """

    def supports(self, op: Op, type: TensorType) -> bool:
        """Return True if the device can run `op` with a first operand (a weight matrix or a table) of `type`. May be
        optimistic for remote devices.
        """

    def memory(self) -> tuple[int, int]:
        """Return (free bytes, total bytes)."""

    # --- liveness ---

    @property
    def lost(self) -> DeviceLost | None:
        """The failure that ended it; None while it is alive, and always None for a device that cannot be lost."""

    def on_lost(self, callback: Callable[[DeviceLost], None]) -> None:
        """Call `callback` once when the device is lost, or now if it is lost already. The callback may run in any
        thread and must not block.
        """

    @property
    def numerics(self) -> str | None:
        """A fingerprint of everything the bits of its results depend on: two devices with the same value compute the
        same bits. None if unknown.
        """

    @property
    def heartbeat_seconds(self) -> float | None:
        """Seconds that its latest heartbeat took; None if there are no heartbeats."""

    # --- the stream ---

    def place(self, tensors: Sequence[Tensor]) -> list[Buffer]:
        """Allocate zeroed memory for tensors and bind them to it. Raise `DeviceError` if there is not enough.

        Free the returned buffers to release it.
        """

    def announce_weights(self, weights: Sequence[tuple[Tensor, Bytes]]) -> None:
        """Announce weights that `load` will get soon, perhaps in several calls, so that slow preparation can begin."""

    def load(self, weights: Sequence[tuple[Tensor, Bytes]], progress: LoadProgress | None = None) -> list[Buffer]:
        """Fill weights with their bytes and bind them; a `local` device uses the bytes in place."""

    def write(self, tensor: Tensor, data: NDArray[Any], offset: int = 0) -> None:
        """Copy the bytes of `data` to byte `offset` of a bound tensor; `data` may change once this returns."""

    def prepare(self, graph: Graph, quota: KernelQuota | None = None) -> object:
        """Do the one-time work of the first `submit` of this graph now, without reading any tensor.

        Raise `NoKernelsLeft` if more kernels than `quota` have to be made.
        """

    def submit(self, graph: Graph) -> None:
        """Compute a graph. Its bound outputs can be read afterwards."""

    def launch(self, graph: Graph) -> None:
        """Like `submit`, but a `local` device may return early; call `finish` before its memory is read or written in
        place.
        """

    def finish(self) -> None:
        """Wait until launched graphs are done, if the device is `local`."""

    def read(self, tensor: Tensor, offset: int, size: int) -> Future[Bytes]:
        """Read `size` bytes of a bound tensor, as they are after all earlier work.

        A `local` device may return its own memory, which the next graph overwrites.
        """

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the bytes of one bound tensor to another of the same size, which may overlap it (memmove)."""

    @property
    def local_weight_bytes(self) -> int:
        """Bytes of weights that it loaded from files of its own machine, so that they were not sent."""

    @property
    def links(self) -> bool:
        """True if it can pass tensors directly to other devices that can, too."""

    def link(self, target: Device) -> TensorLink | None:
        """Open a direct link to another device; may take seconds. Return None if that is impossible: then the caller
        moves the tensors.
        """

    def profile(self, graph: Graph, repeats: int = 20) -> list[OperationTime]:
        """Run a graph and return the time of each operation, in order. Raise `DeviceError` if the device cannot
        measure.
        """

    # --- working memory, if clients share it ---

    reserve: Callable[[int], None]
    """Called before the working memory of graphs grows to that many bytes; raises `DeviceError` to refuse."""

    @property
    def working_bytes(self) -> int:
        """Bytes of working memory that the prepared graphs need: their activations, one graph at a time."""

    def drop_graphs(self, graphs: Iterable[Graph]) -> None:
        """Drop these graphs and the working memory that only they used."""

    def trim_memory(self) -> None:
        """Return working memory to the OS until the next graph runs."""

    def abandon(self) -> None:
        """Make a `submit` in another thread return soon with meaningless results. May be called again until it has
        returned.
        """

    def close(self) -> None:
        """Release all resources."""


def is_accelerator(device: Device) -> bool:
    """Return True for a device of this machine with memory of its own, such as a graphics card."""
    return not device.local and device.endpoint is None
