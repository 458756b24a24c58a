"""Memory of this process alone, in pages of two megabytes where it is used as a whole and the system has them."""

from __future__ import annotations

import contextlib
import mmap

LARGE = 4 << 20
"""Bytes from which on large pages are asked for: the processor has to remember where fewer of them are."""
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
