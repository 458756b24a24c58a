"""Merging of neighbours: the loop that byte-pair encoding and SentencePiece's greedy algorithm share.

Every character starts as a symbol. Of all neighbouring pairs that may merge, the one of least cost does, the leftmost
where costs are equal, until no pair may. Both functions below do exactly this: one is quick for words, the other takes
n log n steps and so stands long hostile input.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf

Cost = Callable[[str, str], float]  # of merging two neighbours; infinite where they may not merge

SHORT = 40  # symbols; above this the heap is quicker


def merge(text: str, cost: Cost) -> list[str]:
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


def merge_long(text: str, cost: Cost) -> list[str]:
    """`merge` by a heap of pairs; a symbol is named by where it starts, and the next one starts where it ends."""
    n = len(text)
    end = list(range(1, n + 1))  # 0: merged into the symbol to its left
    previous = list(range(-1, n - 1))
    pairs = [(cost(text[i], text[i + 1]), i, i + 1, i + 2) for i in range(n - 1)]
    pairs = [pair for pair in pairs if pair[0] != inf]
    heapify(pairs)
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
    return [text[i:e] for i, e in enumerate(end) if e]
