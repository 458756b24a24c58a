"""Who owns which cells of the KV cache.

The cache is one pool of cells. Each sequence owns one run of cells in position order, so that a token's cell is the
run's start plus its position and attention reads one range. Runs start and end at multiples of 256, the step in which
attention's length is padded (one compiled program serves many lengths).
"""

from __future__ import annotations

from collections.abc import Callable

ALIGN = 256


def align(n: int) -> int:
    """The least multiple of 256 that is at least n."""
    return -(-n // ALIGN) * ALIGN


class Run:
    """Cells `[start, start + capacity)` of one sequence, of which the first `used` hold its tokens.

    The pool may take back cells beyond the first `need`, which is what the last `allocate` or `grow` asked for.
    """

    __slots__ = ("capacity", "need", "start", "used")

    def __init__(self, start: int, capacity: int) -> None:
        self.start = start
        self.capacity = capacity
        self.need = 0
        self.used = 0

    @property
    def end(self) -> int:
        return self.start + self.capacity

    def __repr__(self) -> str:
        return f"Run({self.start}..{self.end}, used {self.used})"


def _least(run: Run) -> int:
    return align(max(run.used, run.need, 1))


class KVPool:
    """Allocates runs, and moves them with `copy_cells(src, dst, n)` when they must grow and have no room.

    The pool never takes cells from a run: `allocate` and `grow` say no, and the engine decides who gives up a run.
    """

    def __init__(self, n_cells: int, copy_cells: Callable[[int, int, int], None]) -> None:
        if n_cells <= 0 or n_cells % ALIGN:
            raise ValueError(f"the pool's size must be a positive multiple of {ALIGN}, not {n_cells}")
        self.n_cells = n_cells
        self._copy_cells = copy_cells
        self._runs: list[Run] = []  # by start

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, by start."""
        return tuple(self._runs)

    @property
    def free_cells(self) -> int:
        return self.n_cells - sum(run.capacity for run in self._runs)

    def allocate(self, need: int, want: int = 0) -> Run | None:
        """A run of at least `need` cells, of up to `want` where a gap offers them; None where even compacting fails."""
        asked, need = need, align(max(need, 1))
        want = max(align(want), need)
        gap = self._fit(need, want)
        if gap is None:
            if self._spare(None) < need:
                return None
            self._compact()
            start = self._runs[-1].end if self._runs else 0
            gap = (start, need)
        start, room = gap
        run = Run(start, min(room, want))
        run.need = asked
        self._runs.append(run)
        self._runs.sort(key=lambda run: run.start)
        return run

    def free(self, run: Run) -> None:
        """Give the run's cells back."""
        self._runs.remove(run)
        run.capacity = run.used = 0

    def grow(self, run: Run, need: int, want: int = 0) -> bool:
        """Let the run hold at least `need` cells, up to `want` where they are free; its tokens move along.

        In place where the cells behind are free, else in the best fitting gap, else after compacting the pool. False,
        with the run as it was, where the pool cannot hold it.
        """
        if run.capacity >= need or self._extend(run, align(need), max(align(want), align(need))):
            run.need = need
            return True
        return False

    def _extend(self, run: Run, need: int, want: int) -> bool:
        place = self._runs.index(run)
        limit = self._runs[place + 1].start if place + 1 < len(self._runs) else self.n_cells
        if limit - run.start >= need:
            run.capacity = min(limit - run.start, want)
            return True
        gap = self._fit(need, want)
        if gap is not None:
            start, room = gap
            if run.used:
                self._copy_cells(run.start, start, run.used)
            run.start, run.capacity = start, min(room, want)
            self._runs.sort(key=lambda run: run.start)
            return True
        if self._spare(run) < need:
            return False
        self._compact(run, need)
        return True

    def _fit(self, need: int, want: int) -> tuple[int, int] | None:
        """Start and size of the tightest gap of at least `want`, else of the widest of at least `need`; lowest first.

        Low starts keep the range of the pool that a batch touches short.
        """
        best: tuple[int, int] | None = None
        start = 0
        for run in [*self._runs, Run(self.n_cells, 0)]:
            room = run.start - start
            if room >= need:
                if best is None:
                    best = (start, room)
                elif room >= want:
                    if best[1] < want or room < best[1]:
                        best = (start, room)
                elif room > best[1]:
                    best = (start, room)
            start = run.end
        return best

    def _spare(self, but: Run | None) -> int:
        """Cells free for one run when all others are trimmed to what they need."""
        return self.n_cells - sum(_least(run) for run in self._runs if run is not but)

    def _compact(self, growing: Run | None = None, need: int = 0) -> None:
        """Pack all runs to the start of the pool in their order, trimmed to what they need; `growing` gets `need`."""
        start = 0
        moves = []
        for run in self._runs:
            run.capacity = need if run is growing else _least(run)
            moves.append((run, start))
            start += run.capacity
        # Downward moves from the bottom, then upward moves from the top: no copy lands on cells still to be moved,
        # since a run that goes down never reaches below the target of one before it that goes up.
        down = [(run, start) for run, start in moves if start < run.start]
        up = [(run, start) for run, start in moves if start > run.start]
        for run, start in [*down, *reversed(up)]:
            if run.used:
                self._copy_cells(run.start, start, run.used)
            run.start = start
