"""Runs: contiguous KV cache cells of a sequence, following the runs that it shares with others."""

from __future__ import annotations

from collections.abc import Iterator

from llamado.models.batch import RowRange


class Run:
    """Cells `[start, start + capacity)` for the tokens of a sequence from position `first` on.

    `parent` has the tokens before. A sequence continues in a run without children. `used` counts all of the sequence's
    tokens. The pool may reclaim cells beyond the first `need` tokens, the number requested by the last `allocate` or
    `grow`. `children` is the number of child runs; a run with children is full and read-only.
    """

    __slots__ = ("capacity", "children", "first", "need", "parent", "start", "used")

    def __init__(self, start: int, capacity: int, first: int = 0, parent: Run | None = None) -> None:
        self.start = start
        self.capacity = capacity
        self.first = first
        self.parent = parent
        self.children = 0
        self.need = 0
        self.used = 0

    @property
    def end(self) -> int:
        return self.start + self.capacity

    @property
    def limit(self) -> int:
        """Return the number of tokens that fit, those of its parents included."""
        return self.first + self.capacity

    @property
    def n_own(self) -> int:
        """Return the number of tokens in its own cells."""
        return self.used - self.first

    def path(self) -> Iterator[Run]:
        """Yield the runs of its sequence, the last first."""
        run: Run | None = self
        while run is not None:
            yield run
            run = run.parent

    def row_ranges(self) -> list[RowRange]:
        """Return the row ranges of its sequence in position order, including free cells; adjacent ones are merged."""
        found: list[RowRange] = []
        for run in self.path():
            if found and run.end == found[-1].row:
                found[-1] = RowRange(run.start, run.capacity + found[-1].n)
            else:
                found.append(RowRange(run.start, run.capacity))
        return found[::-1]

    def rows(self, first: int, n: int) -> list[RowRange]:
        """Return the row ranges of `n` tokens of its sequence from position `first` on."""
        found, at = [], 0
        for row, length in self.row_ranges():
            begin, end = max(first, at), min(first + n, at + length)
            if begin < end:
                found.append(RowRange(row + begin - at, end - begin))
            at += length
        return found

    def __repr__(self) -> str:
        return f"Run({self.start}..{self.end}, from {self.first}, used {self.used})"
