"""The pool never lets two runs overlap and never loses a token, whatever is asked of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamado.models.memory.pool import ALIGN, KVPool, Run, align


class Cells:
    """A pool whose cells hold numbers, checked after each call."""

    def __init__(self, n_blocks: int) -> None:
        self.memory = np.full(n_blocks * ALIGN, -1)
        self.pool = KVPool(n_blocks * ALIGN, self.copy)
        self.content: dict[Run, list[int]] = {}
        self.next = 0
        self.copied = 0

    def copy(self, src: int, dst: int, n: int) -> None:
        assert n > 0 and src != dst
        assert 0 <= src <= src + n <= self.pool.n_cells and 0 <= dst <= dst + n <= self.pool.n_cells
        self.memory[dst : dst + n] = self.memory[src : src + n].copy()
        self.copied += n

    def write(self, run: Run, n: int) -> None:
        for _ in range(n):
            self.memory[run.start + run.used] = self.next
            self.content[run].append(self.next)
            run.used += 1
            self.next += 1

    def check(self) -> None:
        runs = self.pool.runs
        assert set(runs) == set(self.content)
        end = 0
        for run in runs:
            assert run.start >= end, "runs overlap or are out of order"
            assert run.start % ALIGN == 0 and run.capacity % ALIGN == 0 and run.capacity > 0
            assert max(run.used, run.need) <= run.capacity
            assert self.memory[run.start : run.start + run.used].tolist() == self.content[run]
            end = run.end
        assert end <= self.pool.n_cells
        assert self.pool.free_cells == self.pool.n_cells - sum(run.capacity for run in runs)


ACTIONS = st.tuples(st.integers(0, 3), st.integers(0, 900), st.integers(0, 1500))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12), st.lists(ACTIONS, max_size=60))
def test_any_history(n_blocks: int, history: list[tuple[int, int, int]]) -> None:
    cells = Cells(n_blocks)
    pool = cells.pool
    for action, a, b in history:
        runs = list(pool.runs)
        least = sum(align(max(run.used, run.need, 1)) for run in runs)
        if action == 0 or not runs:
            run = pool.allocate(a, b)
            assert (run is not None) == (least + align(max(a, 1)) <= pool.n_cells)
            if run is not None:
                assert run.capacity >= a
                cells.content[run] = []
        elif action == 1:
            run = runs[a % len(runs)]
            pool.free(run)
            del cells.content[run]
        elif action == 2:
            run = runs[a % len(runs)]
            fits = least - align(max(run.used, run.need, 1)) + align(b) <= pool.n_cells
            assert pool.grow(run, b, b + a) == (fits or b <= run.capacity)
            assert run.capacity >= b or not fits
        else:
            run = runs[a % len(runs)]
            if a % 5 == 0:
                run.need = 0
            cells.write(run, min(b, run.capacity - run.used))
        cells.check()


def test_best_fit_and_growth_in_place() -> None:
    cells = Cells(10)
    pool = cells.pool
    runs = [pool.allocate(n * ALIGN) for n in (2, 1, 1, 1, 2)]
    assert all(run is not None for run in runs)
    a, b, c, d, e = (run for run in runs if run is not None)
    for run in (a, b, c, d, e):
        cells.content[run] = []
    pool.free(a)
    pool.free(c)
    del cells.content[a], cells.content[c]
    f = pool.allocate(10)
    assert f is not None and f.start == 3 * ALIGN, "the tightest gap"
    cells.content[f] = []
    cells.write(d, 100)
    assert pool.grow(e, 4 * ALIGN) and e.start == 5 * ALIGN and cells.copied == 0, "room behind: no move"
    assert pool.grow(d, 2 * ALIGN) and d.start == 0 and cells.copied == 100
    cells.check()


def test_a_size_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(ValueError, match="256"):
        KVPool(1000, lambda src, dst, n: None)
