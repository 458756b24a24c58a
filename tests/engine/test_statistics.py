"""Engine statistics: counters and timings, refused requests, and the start of idle time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest
from waiting import GUARD, until

from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.drafts.suffix import Suffix
from llamado.engine.engine import Engine
from llamado.engine.errors import QueueFull
from llamado.engine.request import Done, GenerationParams, Histogram, Request
from llamado.engine.sampling.params import Sampling
from llamado.engine.scheduler.statistics import Buckets

from .fake import Client, FakeForward, FakeTokenizer, ask, new_engine, req, send, settled

Make = Callable[..., tuple[Engine, FakeForward]]


@pytest.fixture
def make(exits: ExitStack) -> Make:
    def build(n_cells: int = 4096, *, n_vocab: int = 97, **kw: Any) -> tuple[Engine, FakeForward]:
        forward = FakeForward(n_cells, n_vocab=n_vocab)
        engine = exits.enter_context(closing(new_engine(forward, FakeTokenizer(), **kw)))
        return engine, forward

    return build


def blocked(engine: Engine, forward: FakeForward, n: int) -> tuple[threading.Event, list[Client]]:
    """Send `n` requests, the first of which stays in a forward pass until the event is set."""
    gate, inside = threading.Event(), threading.Event()

    def wait(_: int) -> None:
        inside.set()
        assert gate.wait(GUARD)

    forward.before = wait
    clients = [send(engine, req([1, 2, 3 + i])) for i in range(n)]
    assert inside.wait(60)
    return gate, clients


def test_buckets() -> None:
    buckets = Buckets((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 4.5, 100.0):
        buckets.add(value)
    assert buckets.histogram() == Histogram((1.0, 2.0, 4.0), (2, 1, 1, 2), 111.5)


def test_histograms(make: Make) -> None:
    engine, forward = make(n_slots=2)
    for i in range(3):
        ask(engine, req([1 + i, 2, 3], 5))
    counters = settled(engine).counters
    assert sum(counters.first_token_seconds.counts) == sum(counters.queue_seconds.counts) == 3
    assert sum(counters.inter_token_seconds.counts) == 3 * 4
    assert counters.first_token_seconds.sum >= counters.queue_seconds.sum > 0
    tokens = counters.batch_tokens
    assert sum(tokens.counts) == len(forward.sizes) and tokens.sum == sum(forward.sizes)
    for histogram in (counters.first_token_seconds, counters.inter_token_seconds, tokens):
        assert list(histogram.bounds) == sorted(histogram.bounds)
        assert len(histogram.counts) == len(histogram.bounds) + 1


class Clock:
    """Replaces `time` in the engine's modules; it only advances when a test adds to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.monotonic, self.sleep, self.time = time.monotonic, time.sleep, time.time
        for module in ("scheduler.slots", "scheduler.output", "engine"):
            monkeypatch.setattr(f"llamado.engine.{module}.time", self)

    def perf_counter(self) -> float:
        return self.now


def test_timings_exclude_queue_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward pass takes a second; the wait of the second request for the first counts only as queue time."""
    clock = Clock(monkeypatch)
    engine, forward = make(n_slots=1)
    both = threading.Event()

    def a_second(n: int) -> None:
        assert both.wait(GUARD)
        clock.now += 1.0

    forward.before = a_second
    first = send(engine, req([1, 2, 3], 5))
    second = send(engine, req([4, 5], 3))
    both.set()
    for client, n_prompt, n_predicted in ((first, 3, 5), (second, 2, 3)):
        timings = client.result.timings
        assert (timings.prompt_n, timings.prompt_ms, timings.predicted_n) == (n_prompt, 1000.0, n_predicted)
        assert timings.predicted_ms == 1000.0 * (n_predicted - 1)
        assert (timings.prompt_per_second, timings.predicted_per_second) == (n_prompt, 1.0)
        assert (timings.prompt_per_token_ms, timings.predicted_per_token_ms) == (1000.0 / n_prompt, 1000.0)
    counters = engine.snapshot().counters
    assert counters.queue_seconds.sum == 5.0 and counters.first_token_seconds.sum == 1.0 + 6.0
    assert (counters.prompt_seconds_total, counters.tokens_predicted_seconds_total) == (2.0, 6.0)


def test_queue_time_is_counted(make: Make) -> None:
    """Queue time ends when a slot is free; time to first token includes it."""
    engine, forward = make(n_slots=1)
    gate, clients = blocked(engine, forward, 2)
    time.sleep(0.05)
    gate.set()
    for client in clients:
        assert client.result
    counters = settled(engine).counters
    assert counters.queue_seconds.sum >= 0.05 and counters.first_token_seconds.sum >= 0.1


@pytest.mark.slow
def test_draft_counters(make: Make) -> None:
    engine, _ = make(n_vocab=3, drafts=DraftManager([Suffix()]))
    results = [ask(engine, req([1, 2, 1, 2, 1], 200, cache_prompt=False)) for _ in range(3)]
    counters = settled(engine).counters
    assert 0 < counters.n_accepted < counters.n_drafted and 0 < counters.n_drafts <= counters.n_drafted
    assert sum(counters.accepted_at) == counters.n_accepted
    assert list(counters.accepted_at) == sorted(counters.accepted_at, reverse=True)
    assert sum(result.timings.draft_n or 0 for result in results) == counters.n_drafted
    assert sum(result.timings.draft_n_accepted or 0 for result in results) == counters.n_accepted
    plain, _ = make()
    timings = ask(plain, req([1, 2, 1, 2, 1], 20)).timings
    assert (timings.draft_n, timings.draft_n_accepted) == (None, None)


def test_full_queue_refuses_requests(make: Make) -> None:
    engine, forward = make(n_slots=2, max_queue=3)
    gate, clients = blocked(engine, forward, 5)
    with pytest.raises(QueueFull, match="3 requests are waiting already; try again in 1 s") as error:
        send(engine, req([9]))
    assert (error.value.n_waiting, error.value.retry_after) == (3, 1)
    engine.cancel(clients[-1].id)
    gate.set()
    assert all(client.result.n_predicted == 8 for client in clients[:-1])
    assert len({tuple(client.result.tokens) for client in clients[:-1]}) == 4
    assert ask(engine, req([9])).n_predicted == 8, "the queue accepts requests again"


def test_queue_size_zero_refuses_waiting_requests(make: Make) -> None:
    engine, forward = make(n_slots=2, max_queue=0)
    gate, clients = blocked(engine, forward, 2)
    with pytest.raises(QueueFull):
        send(engine, req([9]))
    gate.set()
    assert all(client.result for client in clients)


def test_retry_after_follows_the_pace_of_answers(make: Make) -> None:
    engine, forward = make(n_slots=1, max_queue=20)
    for i in range(4):
        ask(engine, req([1 + i]))
    now = time.monotonic()
    engine._queue.ends.clear()
    engine._queue.ends.extend([now - 8, now - 6, now - 4, now - 2])
    gate, _ = blocked(engine, forward, 21)
    with pytest.raises(QueueFull) as error:
        send(engine, req([9]))
    assert 20 <= error.value.retry_after <= 30, "half of 20, of which one takes 2 s"
    engine._queue.ends.clear()
    engine._queue.ends.append(now - 1000)
    with pytest.raises(QueueFull) as error:
        send(engine, req([9]))
    assert error.value.retry_after == 60
    gate.set()


def test_idle_since(make: Make) -> None:
    engine, forward = make(n_slots=1)
    began = engine.snapshot().idle_since
    assert began is not None and began <= time.monotonic()
    gate, clients = blocked(engine, forward, 2)
    assert engine.snapshot().idle_since is None
    gate.set()
    before = time.monotonic()
    assert all(client.result for client in clients)
    since = until(lambda: engine.snapshot().idle_since)
    assert since is not None and since >= before - 1
    ask(engine, req([5]))
    again = until(lambda: (now := engine.snapshot().idle_since) != since and now)
    assert again and again > since


@pytest.mark.parametrize("n_slots", [1, 2, 4])
def test_several_answers_cost_one_prompt(make: Make, n_slots: int) -> None:
    prompt = [1 + i * 7 % 96 for i in range(300)]
    engine, forward = make(n_slots=n_slots)
    clients = [
        send(
            engine,
            Request(prompt=prompt, params=GenerationParams(n_predict=5, sampling=Sampling(seed=seed, ignore_eos=True))),
        )
        for seed in range(4)
    ]
    answers = [client.result.tokens for client in clients]
    assert len({tuple(answer) for answer in answers}) == 4
    assert sum(forward.sizes) == 300 + 3 + 4 * 4, "the others evaluate the prompt's last token, and their own"
    for seed, answer in enumerate(answers):
        alone, _ = make()
        request = Request(
            prompt=prompt, params=GenerationParams(n_predict=5, sampling=Sampling(seed=seed, ignore_eos=True))
        )
        assert ask(alone, request).tokens == answer


def test_request_waits_for_its_slot(make: Make) -> None:
    engine, forward = make(n_slots=2)
    gate = threading.Event()
    forward.before = lambda n: gate.wait(GUARD) and None
    first = send(engine, req([1, 2, 3], 30, id_slot=1))
    wants = send(engine, req([1, 2, 3], 3, id_slot=1))
    other = send(engine, req([4, 5], 3))
    gate.set()
    assert (other.result.id_slot, wants.result.id_slot) == (0, 1)
    assert isinstance(first.events[-1], Done), "the first request ended before"
