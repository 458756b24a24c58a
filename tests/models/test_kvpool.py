"""KV pool: runs never overlap, no token is lost, and shared cells exist once."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import first_of

from llamado.models.memory.pool import ALIGN, KVPool
from llamado.models.memory.run import Run

BLOCK = 32


class Cells:
    """A pool whose cells hold numbers, checked after each call."""

    def __init__(self, n_blocks: int) -> None:
        self.memory = np.full(n_blocks * ALIGN, -1)
        self.pool = KVPool(n_blocks * ALIGN, self.copy, BLOCK)
        self.content: dict[Run, list[int]] = {}
        self.next = 0
        self.copied = 0

    def copy(self, src: int, dst: int, n: int) -> None:
        assert n > 0 and src != dst
        assert 0 <= src <= src + n <= self.pool.n_cells and 0 <= dst <= dst + n <= self.pool.n_cells
        self.memory[dst : dst + n] = self.memory[src : src + n].copy()
        self.copied += n

    def allocate(self, need: int, want: int = 0) -> Run:
        run = self.pool.allocate(need, want)
        assert run is not None
        self.content[run] = []
        return run

    def free(self, run: Run) -> None:
        self.pool.free(run)
        del self.content[run]

    def write(self, run: Run, n: int) -> None:
        for _ in range(n):
            self.memory[run.start + run.n_own] = self.next
            self.content[run].append(self.next)
            run.used += 1
            self.next += 1

    def fork(self, run: Run, n: int, need: int, want: int = 0) -> Run | None:
        """Fork, and copy the cells that are not shared."""
        new = self.pool.fork(run, n, need, want)
        if new is not None:
            assert new.first % BLOCK == 0 <= n - new.first and new.used == new.first
            row = new.start
            for start, length in run.rows(new.first, n - new.first):
                self.copy(start, row, length)
                row += length
            new.used = n
            self.content[new] = self.content[run][:n]
        return new

    def rewind(self, run: Run, n: int) -> None:
        self.pool.rewind(run, n)
        del self.content[run][n:]

    def read(self, run: Run) -> list[int]:
        rows = run.rows(0, run.used)
        return [number for row, n in rows for number in self.memory[row : row + n].tolist()]

    def check(self) -> None:
        runs, pool = self.pool.runs, self.pool
        own = [run for run in runs if not run.children]
        assert set(own) == set(self.content)
        end = 0
        for run in runs:
            assert run.start >= end, "runs overlap or are out of order"
            assert run.start % BLOCK == run.capacity % BLOCK == run.first % BLOCK == 0 < run.capacity
            assert max(run.used, run.need) <= run.limit
            assert run.children == sum(other.parent is run for other in runs)
            if run.parent is not None:
                assert run.parent in runs and run.parent.end <= run.start, "earlier tokens lie lower"
                assert run.first == run.parent.limit == run.parent.used
            end = run.end
        assert end <= pool.n_cells
        for run in own:
            assert self.read(run) == self.content[run]
            row_ranges = run.row_ranges()
            assert sum(n for _, n in row_ranges) == run.limit
            assert all(a.row + a.n < b.row for a, b in itertools.pairwise(row_ranges))
        held = [row for run in own for start, n in run.rows(0, run.used) for row in range(start, start + n)]
        _, times = np.unique(held, return_counts=True)
        assert pool.n_used == times.size and pool.n_shared == np.sum(times > 1)


def least(run: Run) -> int:
    """Return the number of cells that the pool cannot take from a run."""
    return -(-(max(run.used, run.need, run.first + 1) - run.first) // BLOCK) * BLOCK


def whole(n: int) -> int:
    return -(-max(n, 1) // BLOCK) * BLOCK


ACTIONS = st.tuples(st.integers(0, 6), st.integers(0, 900), st.integers(0, 1500))


def act(cells: Cells, action: int, a: int, b: int) -> None:
    pool, runs = cells.pool, [*cells.content]
    held = sum(least(run) for run in pool.runs)
    run = runs[a % len(runs)] if runs else None
    if action == 0 or run is None:
        run = pool.allocate(a, b)
        assert (run is not None) == (held + whole(a) <= pool.n_cells)
        if run is not None:
            assert run.capacity >= a
            cells.content[run] = []
    elif action == 1:
        cells.free(run)
    elif action == 2:
        fits = held - least(run) + whole(b - run.first) <= pool.n_cells
        assert pool.grow(run, b, b + a) == (fits or b <= run.limit)
        assert run.limit >= b or not fits
    elif action == 3:
        if a % 5 == 0:
            run.need = 0
        cells.write(run, min(b, run.limit - run.used))
    elif action == 4:
        cells.rewind(run, b % (run.used + 1))
    else:
        n = min(b, run.used)
        shared = min(n, run.limit - 1) // BLOCK * BLOCK
        new = cells.fork(run, n, n + a // 3, n + a)
        assert new is not None or held + BLOCK + whole(n + a // 3 - shared) > pool.n_cells, "there was room"
        assert new is None or (new.limit >= n + a // 3 and new.first in (0, shared))
    cells.check()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12), st.lists(ACTIONS, max_size=60))
def test_any_sequence_of_pool_operations(n_blocks: int, history: list[tuple[int, int, int]]) -> None:
    cells = Cells(n_blocks)
    for action, a, b in history:
        act(cells, action, a, b)


@pytest.mark.parametrize("seed", first_of(range(12), 4))
def test_long_sequences_of_pool_operations(seed: int) -> None:
    """Sequences fill the pool, fork, end and are rewound."""
    rng = random.Random(seed)
    cells = Cells(rng.randint(3, 14))
    for _ in range(150):
        (action,) = rng.choices(range(7), (1, 3, 4, 8, 2, 4, 4))
        act(cells, action, rng.randrange(60), rng.randrange(400))


def test_sixty_four_sequences_share_one_prefix() -> None:
    cells = Cells(80)
    first = cells.allocate(2000, 2100)
    cells.write(first, 2000)
    others = [cells.fork(first, 2000, 2050, 2080) for _ in range(63)]
    assert all(others)
    cells.check()
    assert cells.pool.n_shared == 1984 and cells.copied == 63 * 16
    assert cells.pool.n_used == 1984 + 64 * 16
    cells.write(first, 50)
    cells.free(first)
    for other in others[1:]:
        assert other is not None
        cells.free(other)
    cells.check()
    (left,) = cells.content
    assert cells.pool.n_shared == 0 and cells.pool.n_used == 2000 and left.rows(0, 2000)[0].n == 1984


def test_rewinding_into_a_shared_prefix() -> None:
    cells = Cells(4)
    first = cells.allocate(200)
    cells.write(first, 200)
    second = cells.fork(first, 160, 200)
    assert second is not None and second.first == 160
    cells.rewind(second, 100)
    cells.check()
    assert second.first == 96 and cells.pool.n_shared == 96, "what is shared is whole blocks"
    cells.write(second, 50)
    cells.check()
    cells.rewind(first, 0)
    cells.check()
    assert first.first == 0 and cells.pool.n_shared == 0 and second.parent is not None


def test_shared_cells_move_for_all_sequences() -> None:
    cells = Cells(3)
    gone, first = cells.allocate(200), cells.allocate(96, 96)
    cells.write(first, 70)
    forked = [cells.fork(first, 64, 96) for _ in range(2)]
    assert all(forked)
    cells.free(gone)
    row = first.row_ranges()[0].row
    cells.allocate(cells.pool.n_cells - sum(run.capacity for run in cells.pool.runs))
    cells.check()
    assert first.row_ranges()[0].row < row
    for run in forked:
        assert run is not None
        cells.free(run)
    cells.check()
    assert len(cells.pool.runs) == 2, "what is shared no more is one run with the rest"


def test_a_sequence_in_many_ranges_is_copied() -> None:
    cells = Cells(40)
    run = cells.allocate(64)
    for _ in range(60):
        cells.write(run, 33)
        after = cells.fork(run, run.used, run.used + 33)
        assert after is not None
        run = after
    cells.check()
    assert max(len(run.row_ranges()) for run in cells.content) < 40


def test_best_fit_and_growth_in_place() -> None:
    cells = Cells(10)
    pool = cells.pool
    a, _, c, d, e = (cells.allocate(n * ALIGN) for n in (2, 1, 1, 1, 2))
    cells.free(a)
    cells.free(c)
    assert cells.allocate(10).start == 3 * ALIGN, "the tightest gap"
    cells.write(d, 100)
    assert pool.grow(e, 4 * ALIGN) and e.start == 5 * ALIGN and cells.copied == 0, "room behind: no move"
    assert pool.grow(d, 2 * ALIGN) and d.start == 0 and cells.copied == 100
    cells.check()


def test_packing_leaves_each_run_what_it_needs() -> None:
    cells = Cells(3)
    first = cells.allocate(2 * ALIGN, 3 * ALIGN)
    assert first.limit == 3 * ALIGN
    second = cells.allocate(ALIGN)
    assert (first.limit, second.limit) == (2 * ALIGN, ALIGN) and cells.pool.allocate(1) is None
    cells.check()


@pytest.mark.parametrize(("n", "block"), [(1000, 1), (0, 1), (-256, 1), (512, 512 + 256)])
def test_a_size_that_is_no_multiple_is_rejected(n: int, block: int) -> None:
    with pytest.raises(ValueError, match=f"256 and {block}"):
        KVPool(n, lambda src, dst, n: None, block)
