from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from instruction_counts import steps

from llamado.text.errors import TokenizerError
from llamado.text.tokenizer.merging import LONGEST, merge, merge_long, merge_short

Cost = Callable[[str, str], float]


def costs(table: dict[str, float]) -> Cost:
    return lambda left, right: table.get(left + right, inf)


def by_the_book(text: str, cost: Cost) -> list[str]:
    """The definition itself: look for the cheapest pair, leftmost first, merge, begin again."""
    symbols = list(text)
    while True:
        pairs = [(cost(symbols[i], symbols[i + 1]), i) for i in range(len(symbols) - 1)]
        if not pairs or min(pairs)[0] == inf:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


tables = st.dictionaries(st.text("abc", min_size=2, max_size=5), st.integers(0, 6).map(float), max_size=40)


@pytest.mark.slow
@given(st.text("abc", max_size=60), tables)
def test_both_ways_of_merging_follow_the_definition(text: str, table: dict[str, float]) -> None:
    expected = by_the_book(text, costs(table))
    assert merge_short(text, costs(table)) == expected
    assert list(merge_long(text, costs(table))) == expected


def test_of_equal_costs_the_leftmost_merges_first() -> None:
    table = costs({"aa": 1.0, "aaa": 0.0})
    assert merge_short("aaaa", table) == ["aaa", "a"]
    assert list(merge_long("aaaa", table)) == ["aaa", "a"]
    assert list(merge("aaa", costs({"aa": 1.0}))) == ["aa", "a"]


def test_a_cheaper_pair_to_the_right_wins() -> None:
    table = costs({"ab": 2.0, "bc": 1.0})
    assert list(merge("abc", table)) == ["a", "bc"]


def test_nothing_to_merge() -> None:
    assert list(merge("", costs({}))) == []
    assert list(merge("x", costs({}))) == ["x"]
    assert list(merge("xyz", costs({}))) == ["x", "y", "z"]


@pytest.mark.slow
def test_steps_grow_with_length_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    table = costs({"a" * n: float(n) for n in range(2, 9)})
    few, many = (steps(lambda: list(merge("a" * n, table)), monkeypatch) for n in (2000, 8000))  # noqa: B023
    assert few > 2000 and many < 5 * few


def test_a_word_without_end_is_refused() -> None:
    with pytest.raises(TokenizerError, match="too long"):
        merge("a" * (LONGEST + 1), costs({}))
