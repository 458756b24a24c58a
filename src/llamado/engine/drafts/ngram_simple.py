"""llama.cpp's `ngram-simple`: the tokens that followed the last earlier occurrence of the last `n` tokens."""

from __future__ import annotations

from collections.abc import Sequence

from llamado.engine.drafts.contract import NO_PROPOSAL, Drafter, DraftKind, Proposal


class _SimpleDrafter(Drafter):
    def __init__(self, n: int, m: int) -> None:
        self._n, self._m = n, m
        self.forget()

    def forget(self) -> None:
        self._seen: dict[tuple[int, ...], int] = {}  # n-gram → end of its last occurrence
        self._known = 0

    def propose(self, history: Sequence[int], ahead: Sequence[int], most: int) -> Proposal:
        n = self._n
        for end in range(
            max(self._known + 1, n + 1), len(history)
        ):  # the beginning of the sequence is left out, as in llama.cpp
            self._seen[tuple(history[end - n : end])] = end
        self._known = max(self._known, len(history) - 1)
        text = [*history[len(history) - n :], *ahead]
        at = self._seen.get(tuple(text[-n:])) if len(history) > n + self._m + 2 else None
        if at is None:
            return NO_PROPOSAL
        follows = list(history[at : min(at + self._m, len(history) - 1)])
        # like llama.cpp, draft nothing if fewer tokens than `n` follow
        if len(follows) < min(n, self._m):
            return NO_PROPOSAL
        return Proposal(follows[:most], [0] * min(len(follows), most))


class NgramSimple(DraftKind):
    """`n`: tokens of a key; `m`: most draft tokens."""

    name = "ngram-simple"

    def __init__(self, n: int = 12, m: int = 48) -> None:
        self._n, self._m = n, m

    def drafter(self) -> Drafter:
        return _SimpleDrafter(self._n, self._m)
