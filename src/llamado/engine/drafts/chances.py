"""How often drafted tokens are right, by how sure their source was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

_WEIGHT = 2.0  # of what was known before, in tokens
_FADE = 0.95  # of what was learnt, per token of the same mark
_FADE_COMMON = 0.995


class Chances:
    """Learnt from one sequence, beginning with what was learnt from all (`before`), or with a first guess."""

    __slots__ = ("_before", "_common", "_fade", "_seen")

    def __init__(self, before: Chances | Callable[[int], float]) -> None:
        self._common = before if isinstance(before, Chances) else None
        self._before = before.of if isinstance(before, Chances) else before
        self._fade = _FADE_COMMON if self._common is None else _FADE
        self._seen: dict[int, tuple[float, float]] = {}  # of each mark, how many were right of how many

    def of(self, mark: int) -> float:
        """The chance that a token of this mark is right where all before it are."""
        right, n = self._seen.get(mark, (0.0, 0.0))
        return (right + _WEIGHT * self._before(mark)) / (n + _WEIGHT)

    def note(self, mark: int, right: bool) -> None:
        """A token of this mark was right, or the first that was not."""
        n_right, n = self._seen.get(mark, (0.0, 0.0))
        self._seen[mark] = self._fade * n_right + right, self._fade * n + 1.0
        if self._common is not None:
            self._common.note(mark, right)

    def all_right(self, marks: Sequence[int], first: float = 1.0) -> Iterator[float]:
        """The chance that the tokens up to each one are right, where `first` is that of those before them."""
        for mark in marks:
            first *= self.of(mark)
            yield first
