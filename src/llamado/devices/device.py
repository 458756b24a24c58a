"""The contract of everything that runs graphs: an in-order stream of writes, graphs, copies and reads.

The engine sees only this. A tensor is bound to a device by its `buffer` and `offset`; a tensor without a buffer is an
activation that the device places itself. What is submitted is done in order; a read gives a future.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.errors import LlamadoError
from llamado.ggml.graph import Graph
from llamado.ggml.tensor import Tensor

Bytes = NDArray[np.uint8]


class DeviceError(LlamadoError):
    """A device cannot do what was asked: an operation it does not know, no memory, a tensor outside its buffer."""


class Buffer(Protocol):
    """Memory of one device."""

    size: int

    def free(self) -> None:
        """Gives the memory back; tensors in it must not be used any more."""


class Device(Protocol):
    """A place that holds tensors and computes graphs."""

    name: str

    def alloc(self, size: int) -> Buffer:
        """`size` zeroed bytes; DeviceError where there is no room."""

    def adopt(self, memory: Bytes) -> Buffer:
        """Memory that is here already (a mapped file), as a buffer without a copy."""

    def write(self, tensor: Tensor, data: NDArray[Any], offset: int = 0) -> None:
        """Copies the bytes of `data` to byte `offset` of a bound tensor."""

    def submit(self, graph: Graph) -> None:
        """Computes a graph; outputs stay readable until the next one."""

    def read(self, tensor: Tensor, offset: int, size: int) -> Future[Bytes]:
        """`size` bytes of a tensor once everything submitted before is done."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies the bytes of one bound tensor to another of the same size (which may overlap it)."""

    def memory(self) -> tuple[int, int]:
        """Bytes free, bytes in all."""
