"""Huge pages (2 MB) for large buffers and mapped files, if the system supports them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterable
from typing import BinaryIO

LARGE = 4 << 20
"""Smallest size in bytes for which huge pages are requested; they reduce TLB misses."""
STEP = 8 << 20
"""Bytes of a file written at once, at multiples of this size, so that the page cache holds them in large folios."""
_OWN = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def allocate_pages(size: int) -> mmap.mmap:
    """Return `size` zeroed bytes; pages are allocated on first touch. Raises OSError, ValueError or OverflowError."""
    return mmap.mmap(-1, size, **_OWN)


def request_huge_pages(pages: mmap.mmap, start: int, size: int) -> None:
    """Request huge pages for a range that will be used as a whole; call it before the range is touched."""
    end = start + size
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if size >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            pages.madvise(mmap.MADV_HUGEPAGE, start, end - start)


def request_mapped_huge_pages(spans: Iterable[tuple[int, int]]) -> None:
    """Request huge pages for spans of mapped files, given as (address, size), that will be used as a whole.

    On file systems with large folios (ext4 from Linux 6.16 on, XFS, btrfs), data not yet in memory is then read in 2 MB
    pages, and cached data in folios of that size is mapped as huge pages.
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
    """Append `data` to a stream with a buffer of `STEP` bytes, flushing at multiples of `STEP`. Raises OSError."""
    at, n = stream.tell(), len(data)
    start, stop = 0, min(STEP - at % STEP, n)
    while start < n:
        stream.write(data[start:stop])
        if (at + stop) % STEP == 0:
            stream.flush()
        start, stop = stop, min(stop + STEP, n)
