"""Allocation of KV cache cells.

The cache is one pool of cells. Each sequence continues in one run of cells in position order, so that attention reads
few ranges. Sequences with a common beginning share it: those tokens are in a run that is the parent of both, and so on,
so runs form trees. Within a sequence, runs with earlier tokens are at lower rows, and each starts at a multiple of the
pool's block both in cells and in positions. Attention works on whole blocks in cell order, which is then position
order, regardless of where the runs are.
"""

from __future__ import annotations

from collections.abc import Callable

from llamado.models.memory.run import Run

ALIGN = 256
_MOST = 32
"""Number of row ranges of a sequence above which it is copied rather than shared: each range costs time per token."""


def align(n: int) -> int:
    """Return n rounded up to a multiple of 256."""
    return -(-n // ALIGN) * ALIGN


class KVPool:
    """Allocator of runs; moves cells with `copy_cells(src, dst, n)` if a run must grow and has no room.

    Runs start at multiples of `block`. The pool never takes cells from a run: `allocate`, `fork` and `grow` fail, and
    the engine decides which run to release.
    """

    def __init__(self, n_cells: int, copy_cells: Callable[[int, int, int], None], block: int = 1) -> None:
        if n_cells <= 0 or n_cells % ALIGN or n_cells % block:
            raise ValueError(f"the pool's size must be a positive multiple of {ALIGN} and {block}, not {n_cells}")
        self.n_cells = n_cells
        self.block = block
        self._copy_cells = copy_cells
        self._runs: list[Run] = []  # sorted by start
        self.n_shared = 0
        """Number of cells with tokens of more than one sequence."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, sorted by start."""
        return tuple(self._runs)

    @property
    def n_used(self) -> int:
        """Number of cells with tokens."""
        return sum(run.n_own for run in self._runs)

    def allocate(self, need: int, want: int = 0) -> Run | None:
        """Return a run of `need` to `want` cells, depending on the gaps; None if even compaction fails."""
        return self._add(None, 0, need, want)

    def fork(self, run: Run, n: int, need: int, want: int = 0) -> Run | None:
        """Return a run for a sequence of `need` tokens that shares the first `n` tokens of another.

        The run's `first` is the number of shared tokens: whole blocks, leaving the other sequence a block of its own.
        The caller copies the rest. If the other sequence already has very many row ranges, nothing is shared.
        """
        n = min(n, run.limit - 1) // self.block * self.block
        if not n or len(run.row_ranges()) > _MOST:
            return self._add(None, 0, need, want)
        needed, run.need = run.need, max(run.need, n + 1)
        found = self._add(_holder(run, n), n, need, want)
        run.need = needed
        if found is None:
            return None
        found.parent = self._split(_holder(run, n), n)
        found.parent.children += 1
        found.used = n
        self._count()
        return found

    def _add(self, behind: Run | None, first: int, need: int, want: int) -> Run | None:
        """Add a run for tokens from position `first` on, at rows after the run `behind`."""
        cells = self._round_up(max(need - first, 1))
        want = max(self._with_headroom(want - first), cells)
        gap = self._fit(cells, want, behind)
        if gap is None:
            if self._free_for(None) < cells:
                return None
            self._compact()
            gap = (self._runs[-1].end if self._runs else 0, cells)
        start, room = gap
        run = Run(start, min(room, want), first)
        run.need = need
        self._runs.append(run)
        self._runs.sort(key=_start)
        return run

    def _round_up(self, n: int) -> int:
        """Return n rounded up to whole blocks."""
        return -(-n // self.block) * self.block

    def _with_headroom(self, n: int) -> int:
        """Return the cells for n tokens plus headroom, so that a growing sequence seldom moves."""
        return self._round_up(align(n))

    def _split(self, run: Run, n: int) -> Run:
        """Split the run after the sequence's token `n` if needed; return the part that ends there."""
        if run.children and run.limit == n:
            return run
        head = Run(run.start, n - run.first, run.first, run.parent)
        head.children, head.used, head.need = 1, n, n
        self._runs.insert(self._runs.index(run), head)
        run.start, run.capacity, run.first, run.parent = head.end, run.limit - n, n, head
        return head

    def free(self, run: Run) -> None:
        """Release the run, and those of its parents that no other sequence uses."""
        self._runs.remove(run)
        self._drop_child(run.parent)
        run.capacity = run.used = run.first = 0
        run.parent = None

    def _drop_child(self, run: Run | None) -> None:
        """Remove a child from a run; release the run if it was the last."""
        while run is not None:
            run.children -= 1
            if run.children:
                self._merge_child(run)
                break
            self._runs.remove(run)
            run = run.parent
        self._count()

    def _merge_child(self, run: Run) -> None:
        """Merge a run with its only child if that follows it directly."""
        place = self._runs.index(run) + 1
        child = self._runs[place] if place < len(self._runs) else None
        if run.children == 1 and child is not None and child.parent is run and child.start == run.end:
            child.start, child.capacity = run.start, run.capacity + child.capacity
            child.first, child.parent = run.first, run.parent
            self._runs.remove(run)

    def rewind(self, run: Run, n: int) -> None:
        """Rewind the run's sequence to its first `n` tokens, some of which may be in a parent.

        Tokens in a partial block of a parent are copied to the run's own cells.
        """
        if n < run.first:
            first = n // self.block * self.block
            for row, length in run.rows(first, n - first):
                self._copy_cells(row, run.start, length)
            parent, run.parent = run.parent, None
            if first:
                assert parent is not None
                run.parent = self._split(_holder(parent, first), first)
                run.parent.children += 1
            run.first = first
            run.used = run.need = n
            self._drop_child(parent)
        run.used = run.need = n

    def _count(self) -> None:
        sequences: dict[Run, int] = {}
        for own in self._runs:
            if not own.children:
                for run in own.path():
                    sequences[run] = sequences.get(run, 0) + 1
        self.n_shared = sum(run.capacity for run, n in sequences.items() if n > 1)

    def grow(self, run: Run, need: int, want: int = 0) -> bool:
        """Extend the run's sequence to at least `need` tokens, up to `want`; its own tokens move along.

        It grows in place if the next cells are free, else in the best fitting gap, else after compaction. Returns
        False, with the run unchanged, if the pool cannot hold it.
        """
        cells = self._round_up(need - run.first)
        if run.limit >= need or self._extend(run, cells, max(self._with_headroom(want - run.first), cells)):
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
        if self._free_for(run) < need:
            return False
        self._compact(run, need)
        return True

    def _fit(self, need: int, want: int, behind: Run | None = None) -> tuple[int, int] | None:
        """Return start and size of the tightest gap of at least `want`, else of the widest of at least `need`.

        The lowest of equal gaps wins: low starts keep the range of the pool that a batch reads short. With `behind`,
        the gap must follow that run.
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

    def _min_cells(self, run: Run) -> int:
        """Return the minimum number of cells of a run."""
        return self._round_up(max(run.used, run.need, run.first + 1) - run.first)

    def _free_for(self, but: Run | None) -> int:
        """Return the cells free for one run if all runs except `but` are trimmed to their minimum."""
        return self.n_cells - sum(self._min_cells(run) for run in self._runs if run is not but)

    def _compact(self, growing: Run | None = None, need: int = 0) -> None:
        """Pack all runs to the start of the pool in order, trimmed to their minimum; `growing` gets `need`."""
        start = 0
        moves = []
        for run in self._runs:
            run.capacity = need if run is growing else self._min_cells(run)
            moves.append((run, start))
            start += run.capacity
        # Downward moves from the bottom, then upward moves from the top: no copy overwrites cells still to be moved,
        # because a run that moves down never reaches below the target of an earlier one that moves up.
        down = [(run, start) for run, start in moves if start < run.start]
        up = [(run, start) for run, start in moves if start > run.start]
        for run, start in [*down, *reversed(up)]:
            if run.n_own:
                self._copy_cells(run.start, start, run.n_own)
            run.start = start
        for run in self.runs:
            if run.children == 1:
                self._merge_child(run)


def _start(run: Run) -> int:
    return run.start


def _holder(run: Run, n: int) -> Run:
    """Return the run of a sequence that holds its token `n`, counted from 1."""
    return next(holder for holder in run.path() if holder.first < n)
