"""llama.cpp's `ngram-cache` (its `lookup` example): counts of the tokens that followed one to four others.

Counts of this sequence are used first, then those of a file of earlier texts (`dynamic`), and finally those of a file
of a large text (`static`), which also weigh the first two. A token is drafted if it followed often enough, with a large
enough share. The files are llama.cpp's own: for each n-gram four tokens (-1: none), the number of following tokens, and
each of those with its count, all int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llamado.engine.drafts.contract import NO_PROPOSAL, Drafter, DraftKind, Proposal
from llamado.engine.errors import EngineError

_ORDERS = range(1, 5)
_STATIC = 2
_MOST = 8
# by order: least number of occurrences, and least share of one token
_LAX = ((2, 0.66), (2, 0.5), (1, 0.5), (1, 0.5))
_STRICT = ((4, 0.75), (3, 0.66), (2, 0.66), (2, 0.66))

Counts = dict[tuple[int, ...], dict[int, int]]


def read_lookup_cache(path: str | Path) -> Counts:
    """Return the counts of a file written by llama-lookup-create. Raises EngineError."""
    try:
        numbers = np.fromfile(path, "<i4").tolist()
    except OSError as error:
        raise EngineError(f"cannot read the lookup cache {path}: {error}") from None
    found: Counts = {}
    at = 0
    while at < len(numbers):
        key = tuple(token for token in numbers[at : at + 4] if token != -1)
        n = numbers[at + 4] if at + 4 < len(numbers) else 0
        at += 5
        if n < 1 or not key or at + 2 * n > len(numbers):
            raise EngineError(f"{path} is not a lookup cache: it has an invalid n-gram")
        found[key] = dict(zip(numbers[at : at + 2 * n : 2], numbers[at + 1 : at + 2 * n : 2], strict=True))
        at += 2 * n
    return found


class _CacheDrafter(Drafter):
    def __init__(self, kind: NgramCache) -> None:
        self._kind = kind
        self.forget()

    def forget(self) -> None:
        self._counts: Counts = {}
        self._known = 0

    def propose(self, history: Sequence[int], ahead: Sequence[int], most: int) -> Proposal:
        for at in range(max(self._known, 1), len(history)):
            for order in _ORDERS:
                if order <= at:
                    followers = self._counts.setdefault(tuple(history[at - order : at]), {})
                    followers[history[at]] = followers.get(history[at], 0) + 1
        self._known = max(self._known, len(history))
        text = [*history[-_ORDERS[-1] :], *ahead]
        n = len(text)
        marks: list[int] = []
        if n < _STATIC:
            return NO_PROPOSAL
        while len(marks) < min(most, _MOST):
            found = self._next(text)
            if found is None:
                break
            text.append(found[0])
            marks.append(found[1])
        return Proposal(text[n:], marks)

    def _next(self, text: list[int]) -> tuple[int, int] | None:
        """Return the most probable next token and its mark."""
        static = self._kind.static.get(tuple(text[-_STATIC:]), {})
        for base, counts, limits in ((0, self._counts, _LAX), (4, self._kind.dynamic, _STRICT)):
            for order in reversed(_ORDERS):
                followers = counts.get(tuple(text[-order:])) if order <= len(text) else None
                if not followers:
                    continue
                least, share = limits[order - 1]
                best = max(
                    followers, key=lambda token: followers[token] * 100 * static.get(token, 0) or followers[token]
                )
                total = sum(followers.values())
                if total >= least and followers[best] >= share * total:
                    return best, base + order
        if static:
            best = max(static, key=static.__getitem__)
            least, share = _LAX[_STATIC - 1]
            total = sum(static.values())
            if total >= least and static[best] >= share * total:
                return best, 0
        return None


class NgramCache(DraftKind):
    """`static` and `dynamic`: files of `-lcs` and `-lcd`, which are only read. Raises EngineError."""

    name = "ngram-cache"

    def __init__(self, static: str | None = None, dynamic: str | None = None) -> None:
        self.static: Counts = read_lookup_cache(static) if static else {}
        self.dynamic: Counts = read_lookup_cache(dynamic) if dynamic else {}

    def drafter(self) -> Drafter:
        return _CacheDrafter(self)
