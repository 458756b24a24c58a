"""Merging of neighbours: the loop that byte-pair encoding and SentencePiece's greedy algorithm share.

Every character starts as a symbol. Of all neighbouring pairs that may merge, the one of least cost does, the leftmost
where costs are equal, until no pair may. Both functions below do exactly this: one is quick for words, the other takes
n log n steps and so stands long hostile input.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

import numpy as np

from llamado.text.errors import TokenizerError

Cost = Callable[[str, str], float]  # of merging two neighbours; infinite where they may not merge

# Characters; that many take 5 seconds and 200 MB. Only a vocabulary that takes whole lines for words comes near.
LONGEST = 1 << 20
SHORT = 40  # symbols; above this the heap is quicker


def merge(text: str, cost: Cost) -> Iterable[str]:
    """The symbols that remain of `text` when merging is done."""
    return merge_short(text, cost) if len(text) <= SHORT else merge_long(text, cost)


def merge_short(text: str, cost: Cost) -> list[str]:
    """`merge` by looking at every pair each time: n² cheap steps."""
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
    """`merge` by a heap of pairs; a symbol is named by where it starts, and the next one starts where it ends."""
    n = len(text)
    if n > LONGEST:
        raise TokenizerError(f"a word of {n} characters is too long to find its tokens; at most {LONGEST} are allowed")
    # Arrays and a heap that grows by one pair at a time: lists of a million objects, made or given back at once, would
    # keep other threads from running.
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
