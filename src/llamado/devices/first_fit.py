"""First-fit placement of memory blocks with known lifetimes in one arena."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Lifetime(NamedTuple):
    """A block of `size` bytes, needed from step `first` to step `last`, both included; FOREVER: until the end."""

    first: int
    last: float
    size: int


FOREVER = math.inf


def place(lives: Sequence[Lifetime], *, alignment: int, linger: int) -> tuple[int, list[int]]:
    """Return the total bytes, and the offset of each block in the order given.

    First fit: blocks are placed in order of their first step, each in the first gap that is large enough; adjacent gaps
    are merged. Freed memory is not reused for `linger` steps after its last use.
    """
    sizes = [-(-max(life.size, 1) // alignment) * alignment for life in lives]
    ends = sorted(range(len(lives)), key=lambda i: lives[i].last)
    offsets = [0] * len(lives)
    gaps: list[tuple[int, int]] = []  # (offset, size), ascending, never touching
    top = highest = n_freed = 0
    for i in sorted(range(len(lives)), key=lambda i: lives[i].first):
        while lives[ends[n_freed]].last + linger < lives[i].first:
            _free(gaps, offsets[ends[n_freed]], sizes[ends[n_freed]])
            n_freed += 1
        size = sizes[i]
        for at, (start, room) in enumerate(gaps):
            if room >= size:
                gaps[at : at + 1] = [(start + size, room - size)] if room > size else []
                offsets[i] = start
                break
        else:
            if gaps and sum(gaps[-1]) == top:  # grow the gap at the end
                top = gaps.pop()[0]
            offsets[i] = top
            top += size
            highest = max(highest, top)
    return highest, offsets


def _free(gaps: list[tuple[int, int]], at: int, size: int) -> None:
    """Return a gap to the free list, merged with its neighbors."""
    i = next((i for i, gap in enumerate(gaps) if gap[0] > at), len(gaps))
    if i < len(gaps) and at + size == gaps[i][0]:
        size += gaps.pop(i)[1]
    if i and sum(gaps[i - 1]) == at:
        i -= 1
        before = gaps.pop(i)
        at, size = before[0], size + before[1]
    gaps.insert(i, (at, size))
