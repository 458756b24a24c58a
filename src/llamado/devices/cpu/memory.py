"""Host memory as buffers of the CPU device."""

from __future__ import annotations

import mmap
from typing import cast

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceError
from llamado.ggml.tensor import Tensor


class CpuBuffer:
    """Bytes of this process: allocated here (pages appear when touched), or somebody else's (a mapped file)."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self.size = memory.nbytes
        self.address = int(memory.ctypes.data)

    @classmethod
    def allocate(cls, size: int) -> CpuBuffer:
        """`size` zeroed bytes, page-aligned; DeviceError where the system gives none."""
        try:
            pages = mmap.mmap(-1, max(size, 1))
        except (OSError, ValueError, OverflowError) as error:
            raise DeviceError(f"no {size / 1e6:.0f} MB of memory to be had: {error}") from error
        return cls(np.frombuffer(pages, np.uint8, size))

    def free(self) -> None:
        """Lets go of the memory."""
        self.memory = np.empty(0, np.uint8)
        self.size = self.address = 0


def view_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a bound tensor from its first element to its last."""
    root, inside = tensor.root()
    if root.buffer is None:
        raise DeviceError(f"tensor {tensor.name or '?'} has no memory yet")
    buffer = cast(CpuBuffer, root.buffer)
    start = root.offset + inside
    if start + tensor.nbytes > buffer.size:
        raise DeviceError(
            f"tensor {tensor.name or '?'} ends at byte {start + tensor.nbytes} of a buffer of {buffer.size}"
        )
    return buffer.memory[start : start + tensor.nbytes]
