"""The contract of everything that runs graphs: an in-order stream of writes, graphs, copies and reads.

The engine sees only this. A tensor is bound to a device by its `buffer` and `offset`; a tensor without a buffer is an
activation that the device places itself. What is submitted is done in order; a read gives a future.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llamado.errors import LlamadoError
from llamado.ggml.graph import Graph
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

Bytes = NDArray[np.uint8]

Loaded = Callable[[int], None]
"""Is told how many more bytes of weights a device has."""


WEIGHT_TYPES = frozenset(
    {
        TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0,
        TensorType.Q5_1, TensorType.Q8_0, TensorType.Q4_K, TensorType.Q5_K, TensorType.Q6_K, TensorType.IQ4_NL,
    }
)  # fmt: skip
"""Types of weights that this machine's own device has kernels for; workers may have others."""


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


class Buffer(Protocol):
    """Memory of one device."""

    size: int

    def free(self) -> None:
        """Gives the memory back; tensors in it must not be used any more."""


class Device(Protocol):
    """A place that holds tensors and computes graphs.

    A device on another machine fails with DeviceLost, from any method or future, once it is gone.
    """

    name: str
    """How placements and messages call it: "CPU", "RPC0[host:port]"."""

    def place(self, tensors: Sequence[Tensor]) -> list[Buffer]:
        """Gives tensors memory here, zeroed, and binds them to it; DeviceError where there is no room.

        Free the buffers to give it back.
        """

    def load(self, weights: Sequence[tuple[Tensor, Bytes]], progress: Loaded | None = None) -> list[Buffer]:
        """Gives weights their bytes and binds them; a device on this machine uses the bytes where they are."""

    def write(self, tensor: Tensor, data: NDArray[Any], offset: int = 0) -> None:
        """Copies the bytes of `data` to byte `offset` of a bound tensor; `data` may change once this returns."""

    def prepare(self, graph: Graph) -> object:
        """Does now what `submit` of this graph would have to do the first time; what tensors hold is not read yet."""

    def submit(self, graph: Graph) -> None:
        """Computes a graph; its outputs, which are bound, can be read after it."""

    def read(self, tensor: Tensor, offset: int, size: int) -> Future[Bytes]:
        """`size` bytes of a bound tensor as they are once everything submitted before is done."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies the bytes of one bound tensor to another of the same size, which may overlap it (memmove)."""

    def memory(self) -> tuple[int, int]:
        """Bytes free, bytes in all."""

    def close(self) -> None:
        """Gives everything back."""


@runtime_checkable
class Sharable(Protocol):
    """What a device needs besides to serve several clients that know nothing of each other.

    `place`, `memory` and a buffer's `free` may come from any thread, also while a graph runs.
    """

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
