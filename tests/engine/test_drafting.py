"""Drafted tokens: proposed from what was said, kept only where they are right, and never seen in an answer."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from llamado.engine.engine import Engine
from llamado.engine.request import Request
from llamado.engine.sampling.params import Sampling
from llamado.engine.scheduler.drafting import MOST, Cost, Drafter

from .fake import FakeForward, FakeTokenizer, ask, send


def propose(drafter: Drafter, said: list[int], most: int = MOST, least_gain: float = 0.0) -> list[int]:
    tokens = np.zeros(len(said) + 4, np.int32)  # a slot's array is longer than its sequence
    tokens[: len(said)] = said
    return drafter.propose(tokens, len(said), most, least_gain)


def test_what_followed_before_is_proposed() -> None:
    assert propose(Drafter(), [1, 2, 3, 4, 5, 6, 1, 2, 3])[:3] == [4, 5, 6]
    assert propose(Drafter(), [7, 1, 2, 9, 8, 1, 2, 3, 5, 1, 2])[:2] == [3, 5]  # the last time counts
    assert propose(Drafter(), [1, 2, 3, 4]) == []
    assert propose(Drafter(), [5]) == [] and propose(Drafter(), [5, 6, 5], most=0) == []


def test_a_loop_is_drafted_round_and_round() -> None:
    drafter = Drafter()
    for _ in range(9):
        drafter.propose(np.array([1, 2, 3, 1, 2], np.int32), 5, 4, 0.0)
        drafter.learn(4, 4)
    assert propose(drafter, [1, 2, 3, 1, 2, 3, 1]) == ([2, 3, 1] * 6)[:MOST]


def test_a_sequence_that_grows_is_remembered_as_it_grew() -> None:
    said = [random.Random(3).randrange(5) for _ in range(200)]
    drafter, fresh = Drafter(), []
    for n in range(1, 200):
        fresh.append(propose(drafter, said[:n], most=1))
        assert fresh[-1] == propose(Drafter(), said[:n], most=1)


def test_drafts_get_shorter_when_they_are_wrong() -> None:
    drafter = Drafter()
    said = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    lengths = []
    for _ in range(20):
        draft = propose(drafter, said, least_gain=0.05)
        lengths.append(len(draft))
        drafter.learn(len(draft), 0)
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]
    for _ in range(20):
        drafter.learn(8, 8)
    assert len(propose(drafter, said, least_gain=0.05)) == MOST


def company(cost: Cost, n_generating: int, rate: Callable[[bool], float], fixed: float, each: float) -> list[bool]:
    """Runs 2,000 batches of so many sequences; `rate` gives tokens per second with drafts and without."""
    now, owed, drafted = 0.0, 0.0, []
    for i in range(2000):
        drafting = cost.least_gain(n_generating) < 1.0
        drafted.append(drafting)
        n = 1 + i % 5 if drafting else 1
        seconds = fixed + each * n
        now += seconds
        owed += rate(drafting) * seconds
        cost.note(n_generating, n, seconds, int(owed), now)
        owed -= int(owed)
    return drafted


def test_a_token_is_worth_more_while_batches_wait_for_networks() -> None:
    waiting, working = Cost(), Cost()
    for _ in range(3):
        company(waiting, 1, lambda drafting: 100.0 if drafting else 20.0, 0.05, 0.0002)
        company(working, 1, lambda drafting: 1000.0 if drafting else 500.0, 0.001, 0.004)
    assert min(waiting.least_gain(1) for _ in range(5)) < 0.1
    assert max(working.least_gain(1) for _ in range(5)) > 0.5
    gains = [working.least_gain(1) for _ in range(100)]
    assert 1 <= sum(gain < 0.5 for gain in gains) < 10  # now and then it is tried again


def test_what_gives_more_tokens_per_second_is_done() -> None:
    cost = Cost()
    busy = company(cost, 8, lambda drafting: 250.0 if drafting else 400.0, 0.01, 0.001)
    idle = company(cost, 1, lambda drafting: 90.0 if drafting else 60.0, 0.01, 0.001)
    assert sum(busy[100:]) < 0.2 * len(busy[100:]) and any(busy[100:])
    assert sum(idle[100:]) > 0.8 * len(idle[100:])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_the_same_with_and_without(temperature: float) -> None:
    """Few tokens, so that many drafts are right by chance; cells of wrong ones would change all that follows."""
    random_ = random.Random(5)
    requests = [
        Request(
            prompt=[random_.randrange(1, 3) for _ in range(random_.randrange(3, 40))],
            n_predict=random_.randrange(1, 120),
            n_probs=2,
            sampling=Sampling(seed=i, ignore_eos=True, temperature=temperature),
        )
        for i in range(24)
    ]
    answers = []
    for drafting in (False, True):
        forward = FakeForward(2048, n_vocab=3, max_batch=24)
        engine = Engine(forward, FakeTokenizer(), n_slots=4, n_ctx=256, drafting=drafting)
        try:
            if drafting:
                assert engine._planner.cost is not None
                engine._planner.cost = Free()
            answers.append([client.result for client in [send(engine, request) for request in requests]])
            batches = len(forward.sizes)
        finally:
            engine.close()
    without, with_ = answers
    assert [r.tokens for r in with_] == [r.tokens for r in without]
    assert [r.probs for r in with_] == [r.probs for r in without]
    assert [r.content for r in with_] == [r.content for r in without]
    n_tokens = sum(len(r.tokens) for r in with_)
    assert n_tokens > 1.2 * batches  # several tokens came of a batch


class Free(Cost):
    """Batches cost nothing."""

    def least_gain(self, n_generating: int) -> float:
        return 0.0


def test_a_draft_ends_where_the_answer_ends() -> None:
    """Budget, context and end-of-text are kept to, whatever was drafted behind them."""
    forward = FakeForward(256, n_vocab=2, max_batch=64)
    engine = Engine(forward, FakeTokenizer(eog=(0,)), n_slots=1, n_ctx=64, drafting=True)
    engine._planner.cost = Free()
    try:
        for n in range(1, 30):
            result = ask(engine, Request(prompt=[1, 1, 1], n_predict=n, sampling=Sampling(seed=n)))
            assert len(result.tokens) <= n and 0 not in result.tokens[:-1]
        full = ask(engine, Request(prompt=[1] * 20, sampling=Sampling(seed=1, ignore_eos=True)))
        assert full.truncated and len(full.tokens) == 64 - 20
    finally:
        engine.close()
