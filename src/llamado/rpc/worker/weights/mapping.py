"""Files mapped over a region's memory, copy-on-write: nothing is copied, and later writes stay in this process."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from llamado.devices.cpu.mapped import watch
from llamado.rpc.worker.memory import PAGE

_LEAST_MAPPED = 256 << 10
_READ_WRITE, _PRIVATE_FIXED = 0x3, 0x12  # PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED of Linux


def map_file(file: int, start: int, memory: memoryview, offset: int, size: int, advice: str) -> tuple[int, int]:
    """Map the whole pages among `size` bytes of a file, from byte `start` on, over those at `offset` of a region.

    Returns the mapped range of the `size` bytes (first, end). It is empty if file and memory differ in their page
    offsets. As with any mapped file, a program that truncates it ends this process, which then logs `advice`.
    """
    there = np.frombuffer(memory, np.uint8)[offset : offset + size]
    address = there.ctypes.data
    first, end = -start % PAGE, size - (start + size) % PAGE
    if (
        sys.platform != "linux"
        or (address - start) % PAGE
        or end - first < _LEAST_MAPPED
        or os.sysconf("SC_PAGE_SIZE") != PAGE
    ):
        return 0, 0
    mmap: Any = ctypes.CDLL(None).mmap
    mmap.restype = ctypes.c_void_p
    mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    if mmap(address + first, end - first, _READ_WRITE, _PRIVATE_FIXED, file, start + first) != address + first:
        return 0, 0
    # The watch needs no end: memory that is mapped there later replaces it.
    watch(Path(os.readlink(f"/proc/self/fd/{file}")), there[first:end], advice)
    return first, end
