"""Acceptance rates of draft tokens, by the confidence of their source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

_WEIGHT = 2.0  # weight of the prior, in tokens
_FADE = 0.95  # decay of the counts, per token of the same mark
_FADE_COMMON = 0.995


class AcceptanceRates:
    """Acceptance rates of one sequence, with the engine's rates (`before`) or a first guess as prior."""

    __slots__ = ("_before", "_common", "_fade", "_seen")

    def __init__(self, before: AcceptanceRates | Callable[[int], float]) -> None:
        self._common = before if isinstance(before, AcceptanceRates) else None
        self._before = before.of if isinstance(before, AcceptanceRates) else before
        self._fade = _FADE_COMMON if self._common is None else _FADE
        self._seen: dict[int, tuple[float, float]] = {}  # mark → accepted tokens, tokens

    def of(self, mark: int) -> float:
        """Return the probability that a token of this mark is accepted if all before it are."""
        right, n = self._seen.get(mark, (0.0, 0.0))
        return (right + _WEIGHT * self._before(mark)) / (n + _WEIGHT)

    def note(self, mark: int, right: bool) -> None:
        """Record that a token of this mark was accepted, or was the first rejected one."""
        n_right, n = self._seen.get(mark, (0.0, 0.0))
        self._seen[mark] = self._fade * n_right + right, self._fade * n + 1.0
        if self._common is not None:
            self._common.note(mark, right)

    def all_accepted(self, marks: Sequence[int], first: float = 1.0) -> Iterator[float]:
        """Yield for each token the probability that all up to it are accepted. `first`: the probability for those
        before them.
        """
        for mark in marks:
            first *= self.of(mark)
            yield first
