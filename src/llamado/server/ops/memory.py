"""Memory: what stays is not looked at again, and what was needed for a moment is given back to the system.

Python's collector of cycles stops all threads while it looks; through everything, say 10,000 connections or a body of a
million parts, for a tenth of a second. So it looks through young objects only, and through all when the process rests.

glibc keeps what a burst of connections or a body of 16 MB took, in case it comes again; the process then looks as if it
leaked. So whenever the process has grown, or has let go of much, what is free in it is handed back.
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

LOOK_SECONDS = 2.0
COLLECT_SECONDS = 60.0  # between two looks through everything, while the process grows
GROWN = 16 << 20  # bytes beyond what was resident after the last time
# Objects before the youngest are looked through; times that makes before the next older are; and those, the oldest.
THRESHOLDS = (10_000, 2, 5_000)


def keep() -> None:
    """Everything made so far stays: the collector need not walk it in the middle of an answer. It may have been off."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()


@cache
def _trim() -> Any:
    """glibc's `malloc_trim`; None elsewhere."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def resident() -> int:
    """Bytes of RAM this process has; 0 where the system does not tell."""
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
    """glibc's `mallinfo2` (2.33 and later); None elsewhere."""
    found = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if found is not None:
        found.restype = _HeapInfo
    return found


def free_in_heap() -> int:
    """Bytes that were freed and that glibc keeps, with or without pages behind them; 0 where it does not tell."""
    info = _heap_info()
    return 0 if info is None else int(info().fordblks)


def give_back(*, collect: bool = True) -> None:
    """Return free memory to the system, with `collect` also what only cycles keep alive."""
    if collect:
        gc.collect()
    trim = _trim()
    if trim is not None:
        trim(0)  # without the interpreter's lock


async def watch() -> None:
    """Give memory back whenever the process has grown and grows no more, or much was freed; runs until cancelled."""
    loop = asyncio.get_running_loop()
    least = last = resident()
    unused = free_in_heap()
    collected = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = resident()
        collect = time.monotonic() - collected >= COLLECT_SECONDS
        # What was used the last time may be free by now without the process being any smaller.
        freed = free_in_heap()
        if freed - unused > GROWN or (now - least > GROWN and now <= last + GROWN // 4):
            await loop.run_in_executor(None, partial(give_back, collect=collect))
            if collect:
                collected = time.monotonic()
            after = resident()
            # What did not go is used; without a look through everything it may be garbage all the same.
            least = after if collect or after - least <= GROWN else least
            now, freed = after, free_in_heap()
        last, least, unused = now, min(least, now), freed
