"""Numbers behind the choice of drafts: costs, trials, windows, acceptance rates and marks, for scripted batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any, cast

import numpy as np
import pytest

from llamado.engine.drafts.acceptance import AcceptanceRates
from llamado.engine.drafts.contract import Draft, Drafter, DraftKind, Proposal
from llamado.engine.drafts.cost import Cost, DraftWindow, _Trial
from llamado.engine.drafts.drafts import DraftManager, DraftRequest, _worth
from llamado.engine.drafts.ngram_cache import NgramCache
from llamado.engine.drafts.pending_draft import PendingDraft
from llamado.engine.drafts.suffix import Suffix, SuffixAutomaton


def runs(values: list[Any]) -> list[tuple[Any, int]]:
    return [(value, len(list(group))) for value, group in itertools.groupby(values)]


def test_the_gain_of_a_token_follows_from_a_line_through_the_times_of_batches() -> None:
    cost = Cost()
    first = ((1, 0.010, 1, 0.0), (3, 0.016, 2, 0.0), (1, 0.010, 1, 0.0))  # two of them may include compilation
    for n_tokens, seconds, n_yielded, drafting in first:
        assert cost.least_gain(1) == 0.125
        cost.note(1, n_tokens, seconds, n_yielded, 0.0, drafting)
    later = ((3, 0.016, 2, 0.001), (1, 0.012, 1, 0.0), (3, 0.014, 3, 0.002), (2, 0.013, 2, 0.0))
    for n_tokens, seconds, n_yielded, drafting in later:
        cost.note(1, n_tokens, seconds, n_yielded, 0.0, drafting)
    assert cost.least_gain(1) == pytest.approx(0.164826079, rel=1e-8)
    assert cost.least_gain(1, 0.004) == pytest.approx(0.678941006, rel=1e-8)
    assert cost.least_gain(2) == cost.least_gain(3) == 0.125 != cost.least_gain(1)  # another number of sequences
    for seconds in (0.5, 0.001, 0.001):
        cost.note(1, 9, seconds, 1, 0.0)
    assert cost.least_gain(1) == 0.02  # tokens seem to cost less than nothing
    gains = [cost.least_gain(1) for _ in range(70)]
    assert [i for i, gain in enumerate(gains) if gain != 0.02] == [25, 57] and gains[25] == 0.125


def test_lengths_of_draft_windows() -> None:
    window, lengths = DraftWindow(), []
    for seconds in [0.05] * 10 + [0.0626] * 6 + [0.0624] * 4 + [0.2] * 40 + [0.05] * 3:
        window.note(seconds)
        lengths.append(window.length)
    assert runs(lengths) == [(1, 21), *((n, 2) for n in range(2, 16)), (16, 11), (15, 3)]


def modes(
    rate: Callable[[int, bool], float],
    plain: float = 0.0,
    n: int = 3000,
    seconds: float = 0.03,
    late: Collection[int] = (),
) -> list[int]:
    """Return the numbers of batches in each mode, beginning with drafts, if `rate` tokens a second are yielded."""
    trial, now, owed, found = _Trial(), 0.0, 0.0, []
    for i in range(n):
        found.append(trial.drafting)
        now += seconds + (2.0 if i in late else 0.0)
        owed += rate(i, trial.drafting) * seconds
        trial.note(int(owed), now, plain)
        owed -= int(owed)
    return [length for _, length in runs(found)]


def test_both_modes_are_measured_and_the_worse_one_less_and_less_often() -> None:
    assert modes(lambda _, drafting: 900 if drafting else 800, n=600) == [8, 12, 132, 12, 260, 12, 164]
    slower = modes(lambda _, drafting: 900 if drafting else 1200)
    assert slower == [8, 68, 12, 132, 12, 260, 12, 516, 12, 516, 12, 516, 12, 516, 12, 384]
    assert modes(lambda _, drafting: 900 if drafting else 1000, n=600) == [8, 12, 132, 12, 260, 12, 164]
    changing = modes(lambda i, drafting: (900 if i < 300 else 400) if drafting else 700, n=1500)
    assert changing == [8, 12, 132, 12, 156, 68, 12, 132, 12, 260, 12, 516, 12, 156]


def test_the_plain_rate_replaces_trials_without_drafts() -> None:
    assert modes(lambda *_: 900, 700.0, 300) == [300]
    assert modes(lambda *_: 300, 700.0, 300) == [8, *[12] * 24, 4]


def test_windows_of_a_trial_are_long_enough_and_have_no_pause() -> None:
    def slower(_: int, drafting: bool) -> float:
        return 900 if drafting else 1200

    assert modes(slower, n=300, seconds=0.01) == [20, 164, 25, 91]
    assert modes(slower, n=300, late=(5, 60)) == [14, 71, 12, 132, 12, 59]


def test_a_window_begins_with_nothing_after_a_pause() -> None:
    trial = _Trial()
    trial.note(100, 10.0, 0.0)
    for i in range(1, 9):
        trial.note(1, 10.0 + 0.125 * i, 0.0)
    assert trial._rates == {True: 8.0} and (trial._n, trial._batches) == (0, 0)


def test_acceptance_rates_have_a_prior_of_two_tokens_and_fade() -> None:
    common = AcceptanceRates(lambda mark: 0.25 * mark)
    one = AcceptanceRates(common)
    assert one.of(1) == common.of(1) == 0.25
    one.note(1, True)
    assert common.of(1) == pytest.approx(1.5 / 3) and one.of(1) == pytest.approx(2 / 3)
    one.note(1, False)
    assert common.of(1) == pytest.approx((0.995 + 0.5) / (1.995 + 2))
    assert one.of(1) == pytest.approx((0.95 + 2 * common.of(1)) / (1.95 + 2))
    assert list(one.all_accepted([2, 3])) == [pytest.approx(0.5), pytest.approx(0.375)]


def test_tokens_at_the_limit_are_not_worth_their_time() -> None:
    assert _worth([0.5, 0.25, 0.2], 0.25) == (1, 0.25)
    assert _worth([], 0.25) == (0, 0.0)


@pytest.mark.parametrize(
    ("n", "mark"),
    [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 4),
        (6, 5),
        (8, 5),
        (9, 6),
        (12, 6),
        (13, 7),
        (20, 7),
        (21, 8),
        (34, 9),
    ],
)
def test_marks_of_matches(n: int, mark: int) -> None:
    """The mark of the second token is that of a match which is longer by one."""
    kind = Suffix(shared=False)
    text = [*range(100, 100 + n), 1, 2, 99, *range(100, 100 + n)]
    tokens, marks = kind.drafter().propose(text, (), 2)
    assert tokens == ([1, 2] if n else []) and marks[:1] == ([mark] if n else [])
    guesses = (0.1, 0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
    if mark:
        assert kind.first_guess(mark) == kind.first_guess(100 + mark) == guesses[mark - 1]
        assert marks[1] - mark == (n + 1 in (1, 2, 3, 4, 6, 9, 13, 21, 34))


def test_longer_matches_of_other_outputs_win() -> None:
    kind = Suffix()
    kind.drafter().end([3, 4, 5, 6, 7], 0)
    assert kind.drafter().propose([5, 9, 4, 5], (), 2) == Proposal([6, 7], [102, 103])
    assert kind.drafter().propose([4, 5, 9, 8, 4, 5], (), 2) == Proposal([9, 8], [2, 3])
    assert kind.drafter().propose([4, 5, 9, 8, 3, 4], [5], 2) == Proposal([6, 7], [103, 104])


def test_the_end_of_the_prompt_belongs_to_an_output() -> None:
    kind = Suffix()
    prompt = list(range(100))
    kind.drafter().end([*prompt, 500], 100)
    assert kind.drafter().propose([98, 99], (), 1).tokens == [500]
    assert kind.drafter().propose([66, 67], (), 1).tokens == [68]
    assert kind.drafter().propose([65], (), 1).tokens == []


def test_long_sequences_are_indexed_in_steps_and_from_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.engine.drafts.suffix._CATCH_UP", 4)
    monkeypatch.setattr("llamado.engine.drafts.suffix._LONGEST", 8)
    early = Suffix(shared=False).drafter()
    found = [early.propose([9, 8, 1, 2, 3, 4, 9, 8, 1, 2], (), 1).tokens for _ in range(2)]
    assert found == [[], [3]]


def test_a_split_state_is_found_again() -> None:
    """A match in another text is extended although its state was split meanwhile."""
    automaton = SuffixAutomaton()
    for token in (1, 2, 3):
        automaton.append(token)
    state, n = automaton.follow(*automaton.follow(0, 0, 1), 2)
    state, n = automaton.follow(*automaton.follow(0, 0, 2), 3)
    for token in (2, 4):
        automaton.append(token)
    state, n = automaton.follow(*automaton.follow(0, 0, 2), 4)
    assert n == 2 and automaton.last_end[state] == 5
    assert automaton.follow(state, n, 9) == (0, 0)


@pytest.mark.parametrize(
    ("order", "lax", "strict"),
    [(1, [(2, 66)], [(4, 75)]), (2, [(2, 50)], [(3, 66)]), (3, [(1, 50)], [(2, 66)]), (4, [(1, 50)], [(2, 66)])],
)
def test_counts_and_shares_that_ngrams_need(
    order: int, lax: list[tuple[int, int]], strict: list[tuple[int, int]]
) -> None:
    key = tuple(range(order))
    for base, ((least, share),) in ((0, lax), (4, strict)):
        for total in (least - 1, least, 100):
            for right in {-(-share * total // 100), -(-share * total // 100) - 1}:
                if not 0 < right <= total:
                    continue
                kind = NgramCache()
                drafter = cast(Any, kind.drafter())
                counts = {key: {7: right, **({8: total - right} if right < total and total - right <= right else {})}}
                if sum(counts[key].values()) != total:
                    continue
                if base:
                    kind.dynamic = counts
                else:
                    drafter._counts = counts
                enough = total >= least and right >= share / 100 * total
                assert drafter._next([55, *key]) == ((7, base + order) if enough else None), (base, total, right)


def test_static_counts_weigh_the_followers() -> None:
    kind = NgramCache()
    kind.static = {(1, 2): {5: 1, 6: 3}}
    drafter = cast(Any, kind.drafter())
    assert drafter._next([1, 2]) == (6, 0)
    drafter._counts = {(1, 2): {5: 2, 7: 2}}
    assert drafter._next([1, 2]) == (5, 2)
    kind.static = {(1, 2): {6: 1, 7: 1, 8: 1}}
    assert kind.drafter().propose([3, 1, 2], (), 9) == Proposal([], [])
    assert kind.drafter().propose([3], (), 9) == Proposal([], [])


class TokenSource(DraftKind):
    """Proposes the same tokens for every sequence."""

    name = "scripted"

    def __init__(self, tokens: list[int], guess: float) -> None:
        self.tokens, self.guess = tokens, guess

    def first_guess(self, mark: int) -> float:
        return self.guess

    def drafter(self) -> Drafter:
        kind = self

        class ScriptedDrafter(Drafter):
            def propose(self, history: Any, ahead: Any, most: int) -> Proposal:
                return Proposal(kind.tokens[:most], [0] * len(kind.tokens[:most]))

            def forget(self) -> None:
                pass

        return ScriptedDrafter()


def best(*kinds: DraftKind, least: int = 0, most: int = 64, room: int = 9) -> Draft | None:
    manager = DraftManager(kinds, most=most, least=least)
    state = manager.follow(PendingDraft(), cast(Any, None))
    (draft,) = manager.propose([DraftRequest(state, np.array([1, 2], np.int32), 2, room, 0)], 1)
    assert (draft is None) == (not state.ahead) and (draft is None or state.ahead.drafts == [draft])
    assert sum(count.n_drafts for count in manager.counts) == (draft is not None)
    assert sum(count.n_drafted for count in manager.counts) == len(state.ahead)
    return draft


def test_the_most_valuable_draft_is_chosen() -> None:
    """Its tokens end where the chance that all are accepted falls to the limit, an eighth."""
    likely, long = TokenSource([1, 2], 0.9), TokenSource([3, 4, 5, 6], 0.5)
    for kinds in ((likely, long), (long, likely)):
        draft = best(*kinds)
        assert draft is not None and draft.tokens == [1, 2] and kinds[draft.kind] is likely
    draft = best(long)
    assert draft is not None and draft.tokens == [3, 4]  # a half and a quarter, but not an eighth
    assert best(long, least=3) is None and best(long, least=2) is not None
    shorter = best(long, most=1)
    assert shorter is not None and shorter.tokens == [3]
    limited = best(long, room=1)
    assert limited is not None and limited.tokens == [3] and best(TokenSource([1], 0.1)) is None
