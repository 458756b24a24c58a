"""Host memory as buffers of the CPU device."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from llamado.devices import limits
from llamado.devices.device import DeviceError, DeviceFull
from llamado.ggml.tensor import Tensor
from llamado.gguf.pages import allocate_pages, request_huge_pages

log = logging.getLogger("llamado.devices")

_SLACK = 64
"""Bytes after a buffer: kernels load eight elements at a time, also in the last row of a mask of odd length."""


def cache_aligned_zeros(n: int) -> NDArray[np.int64]:
    """Return `n` zeroed words that begin on a cache line."""
    words = np.zeros(n + 7, np.int64)
    skip = -words.ctypes.data % 64 // 8
    return words[skip : skip + n]


class CpuBuffer:
    """Bytes of this process: allocated here (pages appear when touched), or memory of another owner (a mapped file)."""

    def __init__(self, memory: NDArray[np.uint8], pages: mmap.mmap | None = None) -> None:
        self.memory = memory
        self._pages = pages
        self.size = memory.nbytes
        self.address = int(memory.ctypes.data)

    @classmethod
    def allocate(cls, size: int) -> CpuBuffer:
        """Allocate `size` zeroed bytes, page-aligned. Raise `DeviceFull` if the system refuses."""
        try:
            pages = allocate_pages(size + _SLACK)
        except (OSError, ValueError, OverflowError) as error:
            raise DeviceFull(f"cannot allocate {size / 1e6:.0f} MB of memory: {error}") from error
        return cls(np.frombuffer(pages, np.uint8, size), pages)

    def expect_all(self, start: int, size: int) -> None:
        """Announce that all of these bytes will be used."""
        if self._pages is not None:
            request_huge_pages(self._pages, start, size)

    def lock(self) -> bool:
        """Lock the pages in RAM (mlock(2)). If the system refuses, log a warning with advice and return False."""
        if not self.size:
            return True
        found = limits.memory()
        # cached pages of a file count as free, our own pages as used
        room = found.free if self._pages is None else found.total
        if self.size > room:
            log.warning(
                "--mlock: %.0f MB are not kept in RAM: this process may have %.0f MB more before the system kills it; "
                "give it (its container, its systemd unit) more memory, or leave out --mlock",
                self.size / 1e6,
                room / 1e6,
            )
            return False
        number = _mlock(self.address, self.size)
        if not number:
            return True
        log.warning(
            "cannot keep %.0f MB in RAM: %s%s",
            self.size / 1e6,
            os.strerror(number) if number > 0 else "this system has no mlock",
            f"; the limit is {_lock_limit()}: raise it with `ulimit -l unlimited` (as root), or LimitMEMLOCK=infinity "
            "in a systemd unit, and start again"
            if number > 0
            else "",
        )
        return False

    def discard(self, start: int) -> None:
        """Return the pages from byte `start` on to the OS; they read as zeros afterwards, if the OS takes them."""
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._pages is not None and start < self.size and hasattr(mmap, "MADV_DONTNEED"):
            try:
                self._pages.madvise(mmap.MADV_DONTNEED, start, len(self._pages) - start)
            except OSError as error:
                log.debug("cannot release pages: %s", error)

    def free(self) -> None:
        """Release the memory."""
        self.memory = np.empty(0, np.uint8)
        self._pages = None
        self.size = self.address = 0


def _mlock(address: int, size: int) -> int:
    """Lock pages. Return 0, the error number, or −1 if the system has no such call."""
    try:
        function: Any = ctypes.CDLL(None, use_errno=True).mlock
    except (AttributeError, OSError, TypeError):
        return -1
    done = function(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0
    return 0 if done else ctypes.get_errno() or -1


def _lock_limit() -> str:
    """Describe how much memory a process may lock."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    except (ImportError, AttributeError, OSError, ValueError):
        return "unknown"
    return "none" if limit < 0 else f"{limit / 1e6:.1f} MB"


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
