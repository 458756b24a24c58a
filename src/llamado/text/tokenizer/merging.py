"""Merging of neighbors: the loop of both byte-pair encoding and SentencePiece's greedy algorithm.

Every character starts as a symbol. Of all neighboring pairs that may merge, the one of least cost does, the leftmost of
equal ones, until no pair may merge. Both functions below do exactly this: one is fast for words, the other takes n log
n steps and withstands long hostile input.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

import numpy as np

from llamado.text.errors import TokenizerError

Cost = Callable[[str, str], float]  # of merging two neighbors; infinite if they may not merge

# Characters; this many take 5 seconds and 200 MB. Only vocabularies that treat whole lines as words come near.
LONGEST = 1 << 20
SHORT = 40  # symbols; above this the heap is faster


def merge(text: str, cost: Cost) -> Iterable[str]:
    """Return the symbols of `text` after merging."""
    return merge_short(text, cost) if len(text) <= SHORT else merge_long(text, cost)


def merge_short(text: str, cost: Cost) -> list[str]:
    """`merge` that scans all pairs each time: n² cheap steps."""
    symbols = list(text)
    costs = [cost(a, b) for a, b in pairwise(symbols)]
    while costs:
        least = min(costs)
        if least == inf:
            break
        i = costs.index(least)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        del costs[i]
        if i < len(costs):
            costs[i] = cost(symbols[i], symbols[i + 1])
        if i:
            costs[i - 1] = cost(symbols[i - 1], symbols[i])
    return symbols


def merge_long(text: str, cost: Cost) -> Iterator[str]:
    """`merge` with a heap of pairs; a symbol is identified by its start, and the next one starts where it ends."""
    n = len(text)
    if n > LONGEST:
        raise TokenizerError(f"a word of {n} characters is too long to find its tokens; at most {LONGEST} are allowed")
    # Arrays and a heap that grows by one pair at a time: creating or freeing lists of a million objects at once would
    # block other threads.
    end = array("q", np.arange(1, n + 1, dtype=np.int64).tobytes())  # 0: merged into the symbol to its left
    previous = array("q", np.arange(-1, n - 1, dtype=np.int64).tobytes())
    pairs: list[tuple[float, int, int, int]] = []
    for i in range(n - 1):
        c = cost(text[i], text[i + 1])
        if c != inf:
            heappush(pairs, (c, i, i + 1, i + 2))
    while pairs:
        _, left, right, stop = heappop(pairs)
        if end[left] != right or end[right] != stop:
            continue  # one of the two has merged with another since
        end[left] = stop
        end[right] = 0
        merged = text[left:stop]
        if stop < n:
            previous[stop] = left
            c = cost(merged, text[stop : end[stop]])
            if c != inf:
                heappush(pairs, (c, left, stop, end[stop]))
        before = previous[left]
        if before >= 0:
            c = cost(text[before:left], merged)
            if c != inf:
                heappush(pairs, (c, before, left, stop))
    return (text[i:e] for i, e in enumerate(end) if e)
