"""Memory trimming: freeze long-lived objects, and return freed heap pages to the system.

Python's cycle collector stops all threads. A full collection takes a tenth of a second with 10,000 connections or a
body of a million parts. So only young objects are collected, except while the process is idle.

glibc keeps the memory of a burst of connections or a body of 16 MB for later use, which looks like a leak. So large
blocks never lie in its heaps, and free memory is returned to the system after the process has grown or has freed much.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

LOOK_SECONDS = 2.0  # between two checks
COLLECT_SECONDS = 60.0  # between two full collections while the process grows
GROWN = 16 << 20  # bytes of growth since the last trim that trigger the next one
LARGE = 4 << 20  # bytes of a block that the system provides and takes back, more than a token's logits
# `gc.set_threshold`: new objects per collection of generation 0, then collections of each generation per older one.
THRESHOLDS = (10_000, 2, 5_000)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def freeze() -> None:
    """Exclude all existing objects from collections, and turn the collector on."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()


def _of_libc(name: str) -> Any:
    """Return a function of the C library, or None on systems other than Linux or without it."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def map_large_blocks() -> None:
    """Make glibc map each block of LARGE bytes on its own, and keep less than that at the end of a heap.

    By default it does so only until the first one is freed: later ones up to its size, at most 32 MiB, lie in heaps.
    Each thread has a heap, and keeps up to twice that size free at its end, which `malloc_trim` does not return.
    """
    mallopt = _of_libc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE)
        mallopt(_M_TRIM_THRESHOLD, LARGE)


def resident() -> int:
    """Return the process's resident memory in bytes; 0 on systems without `/proc`."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * 4096
    except OSError:
        return 0


class _HeapInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    ))  # fmt: skip


@cache
def _heap_info() -> Any:
    """Return glibc's `mallinfo2` (2.33 and later), or None."""
    found = _of_libc("mallinfo2")
    if found is not None:
        found.restype = _HeapInfo
    return found


def free_in_heap() -> int:
    """Return the freed bytes that glibc keeps, with or without pages behind them; 0 without `mallinfo2`."""
    info = _heap_info()
    return 0 if info is None else int(info().fordblks)


def trim(*, collect: bool = True) -> None:
    """Return free memory to the system; `collect`: after a full collection."""
    if collect:
        gc.collect()
    malloc_trim = _of_libc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)  # without the interpreter's lock


async def watch() -> None:
    """Trim memory when the process has stopped growing, or has freed much; runs until cancelled."""
    loop = asyncio.get_running_loop()
    least = last = resident()
    unused = free_in_heap()
    collected = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = resident()
        collect = time.monotonic() - collected >= COLLECT_SECONDS
        # Memory that was in use at the last trim may be free now, although the process is not smaller.
        freed = free_in_heap()
        if freed - unused > GROWN or (now - least > GROWN and now <= last + GROWN // 4):
            await loop.run_in_executor(None, partial(trim, collect=collect))
            if collect:
                collected = time.monotonic()
            after = resident()
            # After a full collection, the memory that is left is in use; without one, it may be garbage.
            least = after if collect or after - least <= GROWN else least
            now, freed = after, free_in_heap()
        last, least, unused = now, min(least, now), freed
