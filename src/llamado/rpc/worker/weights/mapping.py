"""Files put in the place of a region's memory: nothing is copied, and what is written later stays this process's."""

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
    """Puts the whole pages of `size` bytes of a file, from byte `start` on, in the place of those at `offset` of a
    region; tells from which byte to which that is done: none, where the two do not lie in their pages alike.

    As with any mapped file, a program that shortens it while it is used ends this process, which says so with `advice`.
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
    # Not ended: memory that is mapped anew there takes its place.
    watch(Path(os.readlink(f"/proc/self/fd/{file}")), there[first:end], advice)
    return first, end
