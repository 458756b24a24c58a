"""Who owns which cells of the KV cache.

The cache is one pool of cells. Each sequence has one run of cells in position order where it goes on, so that attention
reads few ranges. A sequence that begins as another one does need not have those tokens in cells of its own: they are in
a run that is the parent of both, and so on; together the runs are trees. Of a sequence's runs those with earlier tokens
lie lower, and each begins at a multiple of the pool's block in the cells as in the sequence: attention works on whole
blocks in the order of cells, which so is that of positions, wherever the runs lie.
"""

from __future__ import annotations

from collections.abc import Callable

from llamado.models.memory.run import Run

ALIGN = 256
_MOST = 32
"""Places that a sequence lies in, about, from which another one may share it: each has a price for every token."""


def align(n: int) -> int:
    """The least multiple of 256 that is at least n."""
    return -(-n // ALIGN) * ALIGN


class KVPool:
    """Allocates runs, and moves them with `copy_cells(src, dst, n)` when they must grow and have no room.

    Runs begin at multiples of `block`. The pool never takes cells from a run: `allocate`, `fork` and `grow` say no, and
    the engine decides who gives up a run.
    """

    def __init__(self, n_cells: int, copy_cells: Callable[[int, int, int], None], block: int = 1) -> None:
        if n_cells <= 0 or n_cells % ALIGN or n_cells % block:
            raise ValueError(f"the pool's size must be a positive multiple of {ALIGN} and {block}, not {n_cells}")
        self.n_cells = n_cells
        self.block = block
        self._copy_cells = copy_cells
        self._runs: list[Run] = []  # by start
        self.n_shared = 0
        """Cells with tokens of more than one sequence."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, by start."""
        return tuple(self._runs)

    @property
    def n_used(self) -> int:
        """Cells with tokens."""
        return sum(run.n_own for run in self._runs)

    @property
    def free_cells(self) -> int:
        return self.n_cells - sum(run.capacity for run in self._runs)

    def allocate(self, need: int, want: int = 0) -> Run | None:
        """A run of at least `need` cells, of up to `want` where a gap offers them; None where even compacting fails."""
        return self._add(None, 0, need, want)

    def fork(self, run: Run, n: int, need: int, want: int = 0) -> Run | None:
        """As `allocate`, of a run for `need` tokens in all whose sequence begins with the first `n` of another one.

        It has `first` of them: whole blocks, and the other keeps a block of its own. The rest is to be copied; where
        the other is in very many places already, that is all.
        """
        n = min(n, run.limit - 1) // self.block * self.block
        if not n or len(run.stretches()) > _MOST:
            return self._add(None, 0, need, want)
        needed, run.need = run.need, max(run.need, n + 1)
        found = self._add(_holder(run, n), n, need, want)
        run.need = needed
        if found is None:
            return None
        found.parent = self._cut(_holder(run, n), n)
        found.parent.children += 1
        found.used = n
        self._count()
        return found

    def _add(self, behind: Run | None, first: int, need: int, want: int) -> Run | None:
        """A run for tokens from position `first` on, which lies behind another one."""
        cells = self._whole(max(need - first, 1))
        want = max(self._wanted(want - first), cells)
        gap = self._fit(cells, want, behind)
        if gap is None:
            if self._spare(None) < cells:
                return None
            self._compact()
            gap = (self._runs[-1].end if self._runs else 0, cells)
        start, room = gap
        run = Run(start, min(room, want), first)
        run.need = need
        self._runs.append(run)
        self._runs.sort(key=_start)
        return run

    def _whole(self, n: int) -> int:
        """The least number of cells in whole blocks that is at least n."""
        return -(-n // self.block) * self.block

    def _wanted(self, n: int) -> int:
        """Cells for n tokens and some to spare: a sequence that goes on should seldom have to move."""
        return self._whole(align(n))

    def _cut(self, run: Run, n: int) -> Run:
        """The run that ends with the sequence's token `n`: the first part of this one, where that goes further."""
        if run.children and run.limit == n:
            return run
        head = Run(run.start, n - run.first, run.first, run.parent)
        head.children, head.used, head.need = 1, n, n
        self._runs.insert(self._runs.index(run), head)
        run.start, run.capacity, run.first, run.parent = head.end, run.limit - n, n, head
        return head

    def free(self, run: Run) -> None:
        """Give the run's cells back, and those of its parents that no other sequence has."""
        self._runs.remove(run)
        self._leave(run.parent)
        run.capacity = run.used = run.first = 0
        run.parent = None

    def _leave(self, run: Run | None) -> None:
        """A run has lost a child."""
        while run is not None:
            run.children -= 1
            if run.children:
                self._join(run)
                break
            self._runs.remove(run)
            run = run.parent
        self._count()

    def _join(self, run: Run) -> None:
        """Make one run of this one and its only child where that lies behind it."""
        place = self._runs.index(run) + 1
        child = self._runs[place] if place < len(self._runs) else None
        if run.children == 1 and child is not None and child.parent is run and child.start == run.end:
            child.start, child.capacity = run.start, run.capacity + child.capacity
            child.first, child.parent = run.first, run.parent
            self._runs.remove(run)

    def back(self, run: Run, n: int) -> None:
        """The run's sequence goes back to its first `n` tokens, some of which may be in a parent.

        Those of a block of a parent that is not whole any more move to the run's own cells.
        """
        if n < run.first:
            first = n // self.block * self.block
            for row, length in run.rows(first, n - first):
                self._copy_cells(row, run.start, length)
            parent, run.parent = run.parent, None
            if first:
                assert parent is not None
                run.parent = self._cut(_holder(parent, first), first)
                run.parent.children += 1
            run.first = first
            run.used = run.need = n
            self._leave(parent)
        run.used = run.need = n

    def _count(self) -> None:
        sequences: dict[Run, int] = {}
        for own in self._runs:
            if not own.children:
                for run in own.path():
                    sequences[run] = sequences.get(run, 0) + 1
        self.n_shared = sum(run.capacity for run, n in sequences.items() if n > 1)

    def grow(self, run: Run, need: int, want: int = 0) -> bool:
        """Let the run's sequence have at least `need` tokens, up to `want` where there are cells; those in the run move
        along.

        In place where the cells behind are free, else in the best fitting gap, else after compacting the pool. False,
        with the run as it was, where the pool cannot hold it.
        """
        cells = self._whole(need - run.first)
        if run.limit >= need or self._extend(run, cells, max(self._wanted(want - run.first), cells)):
            run.need = need
            return True
        return False

    def _extend(self, run: Run, need: int, want: int) -> bool:
        place = self._runs.index(run)
        limit = self._runs[place + 1].start if place + 1 < len(self._runs) else self.n_cells
        if limit - run.start >= need:
            run.capacity = min(limit - run.start, want)
            return True
        gap = self._fit(need, want, run.parent)
        if gap is not None:
            start, room = gap
            if run.n_own:
                self._copy_cells(run.start, start, run.n_own)
            run.start, run.capacity = start, min(room, want)
            self._runs.sort(key=_start)
            return True
        if self._spare(run) < need:
            return False
        self._compact(run, need)
        return True

    def _fit(self, need: int, want: int, behind: Run | None = None) -> tuple[int, int] | None:
        """Start and size of the tightest gap of at least `want`, else of the widest of at least `need`; lowest first.

        Low starts keep the range of the pool that a batch touches short. `behind`: a run that the gap lies behind.
        """
        best: tuple[int, int] | None = None
        place = 0 if behind is None else self._runs.index(behind) + 1
        start = 0 if behind is None else behind.end
        for run in [*self._runs[place:], Run(self.n_cells, 0)]:
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

    def _least(self, run: Run) -> int:
        """Cells that a run cannot do without."""
        return self._whole(max(run.used, run.need, run.first + 1) - run.first)

    def _spare(self, but: Run | None) -> int:
        """Cells free for one run when all others are trimmed to what they need."""
        return self.n_cells - sum(self._least(run) for run in self._runs if run is not but)

    def _compact(self, growing: Run | None = None, need: int = 0) -> None:
        """Pack all runs to the start of the pool in their order, trimmed to what they need; `growing` gets `need`."""
        start = 0
        moves = []
        for run in self._runs:
            run.capacity = need if run is growing else self._least(run)
            moves.append((run, start))
            start += run.capacity
        # Downward moves from the bottom, then upward moves from the top: no copy lands on cells still to be moved,
        # since a run that goes down never reaches below the target of one before it that goes up.
        down = [(run, start) for run, start in moves if start < run.start]
        up = [(run, start) for run, start in moves if start > run.start]
        for run, start in [*down, *reversed(up)]:
            if run.n_own:
                self._copy_cells(run.start, start, run.n_own)
            run.start = start
        for run in self.runs:
            if run.children == 1:
                self._join(run)


def _start(run: Run) -> int:
    return run.start


def _holder(run: Run, n: int) -> Run:
    """The one of a sequence's runs that has its token `n`, counted from 1."""
    return next(holder for holder in run.path() if holder.first < n)
