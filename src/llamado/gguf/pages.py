"""Memory in pages of two megabytes, where it is used as a whole and the system has them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterable
from typing import BinaryIO

LARGE = 4 << 20
"""Bytes from which on large pages are asked for: the processor has to remember where fewer of them are."""
STEP = 8 << 20
"""Bytes of a file that are written at once, from a multiple of it on: the system keeps them in large pages."""
_OWN = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def own_pages(size: int) -> mmap.mmap:
    """`size` zeroed bytes, which become pages when they are touched. Raises OSError, ValueError or OverflowError."""
    return mmap.mmap(-1, size, **_OWN)


def expect_all(pages: mmap.mmap, start: int, size: int) -> None:
    """Says that these bytes will all be used, before they are: large pages then, where the system has them."""
    end = start + size
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if size >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE, start, end - start)


def expect_mapped(spans: Iterable[tuple[int, int]]) -> None:
    """Says that these bytes of mapped files, as addresses and sizes, will all be used.

    On file systems with large folios (ext4 from Linux 6.16 on, XFS, btrfs) what is not in memory yet comes in pages of
    two megabytes then, and what is there in such pieces is shown in them.
    """
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    page, stop = mmap.PAGESIZE, 0
    whole: list[list[int]] = []
    for address, size in sorted(spans):
        start, stop = address // page * page, -(-(address + size) // page) * page
        if whole and start <= whole[-1][1] + LARGE:
            whole[-1][1] = max(whole[-1][1], stop)
        else:
            whole.append([start, stop])
    for start, stop in whole:
        if stop - start >= LARGE:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_HUGEPAGE)


def write_in_steps(stream: BinaryIO, data: memoryview) -> None:
    """Appends bytes to a stream with a buffer of a `STEP`, which gives the system whole steps then. Raises OSError."""
    at, n = stream.tell(), len(data)
    start, stop = 0, min(STEP - at % STEP, n)
    while start < n:
        stream.write(data[start:stop])
        if (at + stop) % STEP == 0:
            stream.flush()
        start, stop = stop, min(stop + STEP, n)
