"""llama.cpp's `ngram-map-k` and `ngram-map-k4v`: the tokens that followed the last `n` tokens, with their success.

`k` drafts the tokens that followed the first time, as many as were right at this key's last draft. `k4v` counts up to
four continuations of a key, and drafts the most frequent if it is at least twice as frequent as all others together.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamado.engine.drafts.contract import NO_PROPOSAL, Drafter, DraftKind, Proposal

_CONTINUATIONS = 4


class _Continuation:
    """The tokens that followed a key: start, number of occurrences, and number of accepted tokens the last time."""

    __slots__ = ("at", "n", "right")

    def __init__(self, at: int, right: int) -> None:
        self.at, self.n, self.right = at, 0, right


class _MapDrafter(Drafter):
    def __init__(self, n: int, m: int, min_hits: int, counts: bool) -> None:
        self._n, self._m, self._min_hits, self._counts = n, m, min_hits, counts
        self.forget()

    def forget(self) -> None:
        self._places: dict[tuple[int, ...], list[int]] = {}
        """End of each occurrence of a key; only the first if continuations are not counted."""
        self._known = 0
        self._hits: dict[tuple[int, ...], int] = {}
        self._continuations: dict[tuple[int, ...], tuple[list[_Continuation], int]] = {}
        self._last: _Continuation | None = None

    def propose(self, history: Sequence[int], ahead: Sequence[int], most: int) -> Proposal:
        n, m = self._n, self._m
        self._last = None
        if len(history) <= 2 * n + m:
            return NO_PROPOSAL
        # a key counts once all tokens that would be drafted after it are known
        for end in range(max(self._known + 1, n + 1), len(history) - m):
            places = self._places.setdefault(tuple(history[end - n : end]), [])
            if self._counts or not places:
                places.append(end)
        self._known = max(self._known, len(history) - m - 1)
        key = tuple([*history[len(history) - n :], *ahead][-n:])
        places = self._places.get(key, [])
        if not places:
            return NO_PROPOSAL
        hits = self._hits[key] = self._hits.get(key, 0) + 1
        if hits < self._min_hits:
            return NO_PROPOSAL
        chosen = self._chosen(history, key, places)
        if chosen is None or not chosen.right:
            return NO_PROPOSAL
        self._last = chosen
        tokens = list(history[chosen.at : chosen.at + min(m, chosen.right, most)])
        return Proposal(tokens, [0] * len(tokens))

    def _chosen(self, history: Sequence[int], key: tuple[int, ...], places: list[int]) -> _Continuation | None:
        found, seen = self._continuations.get(key, ([], 0))
        for at in places[seen:]:
            text = history[at : at + self._m]
            same = next((one for one in found if history[one.at : one.at + self._m] == text), None)
            if same is None and len(found) < _CONTINUATIONS:
                same = _Continuation(at, self._m)
                found.append(same)
            if same is not None:
                same.n += 1
        self._continuations[key] = found, len(places)
        best = max(found, key=lambda one: one.n)
        others = sum(one.n for one in found) - best.n
        return None if others and best.n < 2 * others else best

    def learn(self, drafted: int, accepted: int) -> None:
        if self._last is not None:
            self._last.right = accepted


class NgramMap(DraftKind):
    """`n`: tokens of a key; `m`: most draft tokens; `min_hits`: least occurrences of a key. `counts`: True to count
    continuations (`k4v`).
    """

    def __init__(self, n: int = 12, m: int = 48, min_hits: int = 1, *, counts: bool = False) -> None:
        self.name = "ngram-map-k4v" if counts else "ngram-map-k"
        self._n, self._m, self._min_hits, self._counts = n, m, min_hits, counts

    def drafter(self) -> Drafter:
        return _MapDrafter(self._n, self._m, self._min_hits, self._counts)
