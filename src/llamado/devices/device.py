"""The contract of everything that runs graphs: an in-order stream of writes, graphs, copies and reads.

The engine sees only this. A tensor is bound to a device by its `buffer` and `offset`; a tensor without a buffer is an
activation that the device places itself. What is submitted is done in order; a read gives a future.
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

Loaded = Callable[[int], None]
"""Is told how many more bytes of weights a device has."""


class DeviceError(LlamadoError):
    """A device cannot do what was asked: an operation it does not know, no memory, a tensor outside its buffer."""


class DeviceFull(DeviceError):
    """A device has not as much memory as was asked for."""

    in_logs = "tensor allocation failed"


class DeviceLost(DeviceError):
    """A device is gone with everything it held: its machine, its process or the way to it.

    `device` is its name; a new one may be had from the same place.
    """

    in_logs = "RPC connection failed"

    def __init__(self, device: str, why: str) -> None:
        super().__init__(f"worker {device} is lost: {why}")
        self.device = device
        self.why = why


class NoKernelsLeft(DeviceError):
    """A graph needs more different kernels than it may have made now; those made so far are kept."""


class KernelQuota:
    """How many kernels a graph may still have made; those that are there already cost nothing."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self) -> None:
        """One more is about to be made; raises NoKernelsLeft."""
        if self.left <= 0:
            raise NoKernelsLeft("a graph that needs more different kernels than any model does")
        self.left -= 1


class OperationTime(NamedTuple):
    """Seconds a thread spent in an operation, and before it waiting for the others (means over the threads)."""

    label: str
    work: float
    wait: float


class Address(Protocol):
    """Where a device of another process is."""

    @property
    def host(self) -> str:
        """The machine's name or address."""


class Buffer(Protocol):
    """Memory of one device."""

    size: int

    @property
    def memory(self) -> Bytes | None:
        """Its bytes, where they are this process's."""

    def lock(self) -> bool:
        """Keeps what of it is this machine's in RAM; False, and a warning that says why, where the system refuses."""

    def free(self) -> None:
        """Gives the memory back, from any thread; tensors in it must not be used any more."""


class LinkLost(DeviceLost):
    """What one device passed to another did not arrive, although both may be there: `device` names the two."""

    def __init__(self, link: str, why: str) -> None:
        super().__init__(link, why)
        self.args = (f"the link {link} is lost: {why}",)


class Arrival(NamedTuple):
    """Bytes that a device passed to another are there; seconds that it had computed for them."""

    computed: float


class TensorLink(Protocol):
    """A way from one device to another by which tensors go without being carried by whoever uses both."""

    @property
    def lost(self) -> LinkLost | None:
        """Why nothing goes by it any more; None while all is well."""

    def send(self, source: Tensor, size: int) -> int:
        """Sends the first `size` bytes of a bound tensor, as they are once all submitted to its device before is done;
        the number by which they are received.
        """

    def receive(self, number: int, target: Tensor, size: int) -> Future[Arrival]:
        """Has the other device wait for the bytes of that number before all that is asked of it later, and put them
        into a bound tensor. Numbers come in the order in which they were sent; some may be left out.
        """

    def close(self) -> None:
        """Ends it: neither device waits for the other any more."""


class Device(Protocol):
    """A place that holds tensors and computes graphs.

    A device on another machine fails with DeviceLost, from any method or future, once it is gone. `place`, `memory` and
    a buffer's `free` may come from any thread, also while a graph runs; everything else from one at a time.
    """

    name: str
    """How placements and messages call it: "CPU", "RPC0[host:port]"."""

    # --- what it is ---

    @property
    def local(self) -> bool:
        """Whether weights are used where their bytes are on this machine: loading them sends and copies nothing."""

    @property
    def endpoint(self) -> Address | None:
        """Where it is; None in this process."""

    @property
    def details(self) -> str:
        """What it computes with, for people ("2 threads"); "" where there is nothing to say."""

    @property
    def clears(self) -> bool:
        """Whether `place` writes to the memory it gives; otherwise all of it may be one page until it is written to."""

    def supports(self, op: Op, type: TensorType) -> bool:
        """Whether it has an operation whose first source (a matrix of weights, a table) is of this type, as far as it
        can tell before it tries.
        """

    def memory(self) -> tuple[int, int]:
        """Bytes free, bytes in all."""

    # --- whether it is there ---

    @property
    def lost(self) -> DeviceLost | None:
        """Why it is gone; None while it is there, and of a device that stays."""

    def on_lost(self, callback: Callable[[DeviceLost], None]) -> None:
        """Calls `callback` once when it is lost (now, if it is), from any thread; it must not block."""

    @property
    def numerics(self) -> str | None:
        """What the bits of its results depend on: two devices of which this is the same compute the same. None where
        nobody knows.
        """

    @property
    def pulse(self) -> float | None:
        """Seconds that its latest sign of life took; None where none is asked for."""

    # --- the stream ---

    def place(self, tensors: Sequence[Tensor]) -> list[Buffer]:
        """Gives tensors memory here, zeroed, and binds them to it; DeviceError where there is no room.

        Free the buffers to give it back.
        """

    def expect(self, weights: Sequence[tuple[Tensor, Bytes]]) -> None:
        """These are about to be loaded, perhaps in several calls: what takes long may begin."""

    def load(self, weights: Sequence[tuple[Tensor, Bytes]], progress: Loaded | None = None) -> list[Buffer]:
        """Gives weights their bytes and binds them; a device that is `local` uses the bytes where they are."""

    def write(self, tensor: Tensor, data: NDArray[Any], offset: int = 0) -> None:
        """Copies the bytes of `data` to byte `offset` of a bound tensor; `data` may change once this returns."""

    def prepare(self, graph: Graph, quota: KernelQuota | None = None) -> object:
        """Does now what `submit` of this graph would have to do the first time; what tensors hold is not read yet.

        Raises NoKernelsLeft where kernels have to be made beyond `quota`.
        """

    def submit(self, graph: Graph) -> None:
        """Computes a graph; its outputs, which are bound, can be read after it."""

    def launch(self, graph: Graph) -> None:
        """As `submit`, but a device that is `local` may return before it is done: `finish` follows before its memory
        is read or written in place.
        """

    def finish(self) -> None:
        """Returns when what was launched is done, if the device is `local`."""

    def read(self, tensor: Tensor, offset: int, size: int) -> Future[Bytes]:
        """`size` bytes of a bound tensor as they are once everything submitted before is done.

        Of a device that is `local` they may be its own memory, which the next graph writes to.
        """

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies the bytes of one bound tensor to another of the same size, which may overlap it (memmove)."""

    @property
    def own_weights(self) -> int:
        """Bytes of the weights it has that are from files of its own machine's: nothing of them was sent."""

    @property
    def links(self) -> bool:
        """Whether it may pass tensors to others that say so, too."""

    def link(self, target: Device) -> TensorLink | None:
        """A way to another device; None where there is none: the caller carries what goes there. May take seconds."""

    def profile(self, graph: Graph, repeats: int = 20) -> list[OperationTime]:
        """Runs a graph and gives the time of each operation, in order; DeviceError where it cannot tell."""

    # --- what it works with, where clients share it ---

    reserve: Callable[[int], None]
    """Is asked before the working memory of graphs grows to so many bytes; refuses with DeviceError."""

    @property
    def working(self) -> int:
        """Bytes of working memory that the graphs prepared so far need: their activations, one graph at a time."""

    def forget(self, graphs: Iterable[Graph]) -> None:
        """These do not come again: gives back the working memory that only they needed."""

    def rest(self) -> None:
        """Gives working memory back to the system until the next graph runs."""

    def abandon(self) -> None:
        """Makes a `submit` in another thread return soon, its results worthless; may come again until it has."""

    def close(self) -> None:
        """Gives everything back."""
