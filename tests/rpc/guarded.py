"""GuardedBuffer device memory: each buffer lies between bytes that must not change and a page without access."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from llamado.devices.cpu.memory import CpuBuffer
from llamado.devices.device import DeviceError

_PAGE = mmap.PAGESIZE
_SLACK = 64
"""Kernels may read, but not write, so far beyond a buffer's end."""
_CANARY = 0xA5


class GuardedBuffer(CpuBuffer):
    """A buffer that ends at a page without access. Changes around it in its own pages are detected."""

    def __init__(self, size: int) -> None:
        room = -(-(size + _SLACK) // _PAGE) * _PAGE
        try:
            pages = mmap.mmap(-1, _PAGE + room + _PAGE)
        except (OSError, ValueError, OverflowError) as error:
            raise DeviceError(f"no {size} bytes: {error}") from error
        whole = np.frombuffer(pages, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        last = ctypes.c_void_p(whole.ctypes.data + _PAGE + room)
        assert libc.mprotect(last, ctypes.c_size_t(_PAGE), 0) == 0
        start = (_PAGE + room - size - _SLACK) // 64 * 64
        self._before, self._after = whole[:start], whole[start + size : _PAGE + room]
        self._before[:] = self._after[:] = _CANARY
        super().__init__(whole[start : start + size])

    @property
    def is_intact(self) -> bool:
        """Return True if no byte beside the buffer was written."""
        return bool((self._before == _CANARY).all() and (self._after == _CANARY).all())

    def free(self) -> None:
        assert self.is_intact, "bytes beside a buffer were written"
        super().free()
        self._before = self._after = np.empty(0, np.uint8)


@contextmanager
def guarded() -> Iterator[list[GuardedBuffer]]:
    """Guard all buffers made inside, and yield them. Freed ones were checked when they were freed."""
    made: list[GuardedBuffer] = []
    original = CpuBuffer.__dict__["allocate"]

    def allocate(_: type[CpuBuffer], size: int) -> CpuBuffer:
        made[:] = [b for b in made if b.size]  # freed ones need no further look
        made.append(GuardedBuffer(size))
        return made[-1]

    CpuBuffer.allocate = classmethod(allocate)  # type: ignore[method-assign, assignment]
    try:
        yield made
    finally:
        CpuBuffer.allocate = original  # type: ignore[method-assign]
