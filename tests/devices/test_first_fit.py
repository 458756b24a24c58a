"""Memory that is used again: nothing lies on what is still needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamado.devices.first_fit import FOREVER, Lifetime, place

LIVES = st.builds(
    lambda first, n, size, kept: Lifetime(first, FOREVER if kept else first + n, size),
    st.integers(0, 20),
    st.integers(0, 8),
    st.integers(0, 300),
    st.integers(0, 9).map(lambda n: n == 0),
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(LIVES, max_size=24), st.sampled_from([1, 32, 64]), st.integers(0, 4))
def test_tensors_in_use_together_do_not_overlap(lives: list[Lifetime], alignment: int, linger: int) -> None:
    size, offsets = place(lives, alignment=alignment, linger=linger)
    highest = 0
    for i, (a, at) in enumerate(zip(lives, offsets, strict=True)):
        end = at + max(a.size, 1)
        highest = max(highest, end)
        assert at % alignment == 0 and end <= size
        for b, other in zip(lives[:i], offsets, strict=False):
            together = a.first <= b.last + linger and b.first <= a.last + linger
            assert not together or end <= other or other + max(b.size, 1) <= at
    assert size - highest < alignment


def test_the_first_gap_that_is_large_enough() -> None:
    lives = [
        Lifetime(0, 0, 10),
        Lifetime(0, 9, 1),
        Lifetime(0, 0, 40),
        Lifetime(0, 9, 1),
        Lifetime(0, 0, 20),
        Lifetime(0, 9, 1),
    ]
    later = [Lifetime(1, 9, 15), Lifetime(1, 9, 20), Lifetime(1, 9, 5), Lifetime(1, 9, 20)]
    size, offsets = place(lives + later, alignment=1, linger=0)
    assert offsets == [0, 10, 11, 51, 52, 72, 11, 26, 0, 52]
    assert size == 73


def test_gaps_that_touch_are_one() -> None:
    lives = [Lifetime(0, 0, 10), Lifetime(0, 1, 10), Lifetime(0, 0, 10), Lifetime(0, 9, 1), Lifetime(2, 9, 30)]
    assert place(lives, alignment=1, linger=0) == (31, [0, 10, 20, 30, 0])


def test_the_last_gap_grows() -> None:
    assert place([Lifetime(0, 9, 5), Lifetime(0, 0, 10), Lifetime(1, 9, 30)], alignment=1, linger=0) == (35, [0, 5, 5])


def test_freed_memory_is_reused_late() -> None:
    chain = [Lifetime(i, i, 64) for i in range(100)]
    for linger, together in ((0, 1), (2, 3), (4, 5)):
        assert place(chain, alignment=64, linger=linger)[0] == 64 * together


def test_empty_graphs_need_no_memory() -> None:
    assert place([], alignment=64, linger=2) == (0, [])
