"""The engine on a fake forward pass that shows every bookkeeping mistake."""

from __future__ import annotations

import functools
import itertools
import math
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import first_of
from waiting import GUARD, until

from llamado.engine.engine import Engine
from llamado.engine.errors import ComputeFailed, ContextExceeded, EngineClosed, InvalidRequest
from llamado.engine.forward.contract import ForwardError
from llamado.engine.options import EngineOptions
from llamado.engine.request import Done, Failure, GenerationParams, Request, Result, Token
from llamado.engine.sampling.params import Sampling
from llamado.engine.scheduler.stop_text import AnswerText

from .fake import Client, FakeForward, FakeTokenizer, ask, new_engine, send, settled

Make = Callable[..., tuple[Engine, FakeForward]]


@pytest.fixture
def make(exits: ExitStack) -> Make:
    def build(
        *,
        n_cells: int = 4096,
        n_vocab: int = 97,
        max_batch: int = 64,
        tokenizer: FakeTokenizer | None = None,
        **kw: Any,
    ) -> tuple[Engine, FakeForward]:
        forward = FakeForward(n_cells, n_vocab=n_vocab, max_batch=max_batch)
        engine = new_engine(forward, tokenizer or FakeTokenizer(), **kw)
        engine = exits.enter_context(closing(engine))
        return engine, forward

    return build


def req(prompt: list[int], n_predict: int = 12, **kw: Any) -> Request:
    sampling = kw.pop("sampling", None) or Sampling(**{"seed": 7, "ignore_eos": True, **kw.pop("s", {})})
    return Request(prompt=prompt, params=GenerationParams(n_predict=n_predict, sampling=sampling, **kw))


def alone(request: Request, **kw: Any) -> Result:
    """Return the answer of an engine that does nothing else, token by token."""
    with closing(Engine(FakeForward(max_batch=1), FakeTokenizer(), EngineOptions(n_slots=1, **kw))) as engine:
        return ask(engine, request)


# -- one request ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch", [1, 2, 7, 64, 512])
def test_chunks_do_not_change_the_answer(make: Make, max_batch: int) -> None:
    prompt = [random.Random(1).randrange(1, 97) for _ in range(100)]
    engine, forward = make(max_batch=max_batch)
    result = ask(engine, req(prompt))
    assert result.tokens == alone(req(prompt)).tokens
    assert forward.sizes[0] == min(max_batch, 100)
    assert sum(forward.sizes) == 100 + 11, "the last token is not evaluated"


def test_result_and_events(make: Make) -> None:
    engine, _ = make(max_batch=8)
    client = send(engine, req(list(range(1, 21)), 5, return_progress=True, timings_per_token=True, n_probs=3))
    result = client.result
    assert [e.index for e in client.tokens] == [0, 1, 2, 3, 4]
    assert [t for e in client.tokens for t in e.tokens] == result.tokens
    assert client.text == result.content == "".join(chr(t + 32) for t in result.tokens)
    assert [p.processed for p in client.progress] == [0, 8, 16, 20]
    assert all(p.total == 20 and p.cache == 0 for p in client.progress)
    assert [p.timings and p.timings.prompt_n for p in client.progress] == [0, 8, 16, 20]
    assert (result.stop_type, result.truncated, result.stopping_word) == ("limit", False, "")
    assert (result.n_prompt, result.n_cached, result.n_predicted, result.n_tokens_cached) == (20, 0, 5, 24)
    assert (result.seed, result.id_slot, result.id_task) == (7, 0, client.id)
    timings = result.timings
    assert (timings.prompt_n, timings.cache_n, timings.predicted_n) == (20, 0, 5)
    assert timings.prompt_ms > 0 and timings.predicted_ms > 0
    assert timings.predicted_per_second == pytest.approx(4e3 / timings.predicted_ms)
    assert timings.prompt_per_token_ms == pytest.approx(timings.prompt_ms / 20)
    for event, probs in zip(client.tokens, result.probs, strict=True):
        assert event.probs == [probs] and event.timings is not None
        assert probs.token.id == event.tokens[0] and len(probs.top) == 3
        assert probs.token.logprob == pytest.approx(math.log(probs.token.prob))
        assert probs.top[0].prob >= probs.top[1].prob >= probs.top[2].prob


def test_progress_of_a_partly_cached_prompt(make: Make) -> None:
    """The first event counts cached tokens as processed, and timings are sent on request only, as by llama-server."""
    engine, _ = make(max_batch=8)
    prompt = list(range(1, 21))
    ask(engine, req(prompt, 1))
    client = send(engine, req([*prompt, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39], 2, return_progress=True))
    assert client.result.n_cached == 20
    assert [(p.total, p.cache, p.processed) for p in client.progress] == [(30, 20, 20), (30, 20, 28), (30, 20, 30)]
    assert [p.time_ms for p in client.progress] == sorted(p.time_ms for p in client.progress)
    assert [event.timings for event in [*client.tokens, *client.progress]] == [None] * 5


@pytest.mark.parametrize(("n_prompt", "max_batch"), [(1, 8), (5, 64), (20, 8), (40, 64), (32, 64), (33, 64)])
def test_prompt_tokens_have_probabilities(make: Make, n_prompt: int, max_batch: int) -> None:
    """They equal the probabilities of those tokens as answers, whatever is cached and however the prompt is divided."""
    engine, _ = make(max_batch=max_batch)
    prompt = [3 * i % 50 for i in range(n_prompt)]
    for _ in range(2):  # the second time, the whole prompt would be in the cache
        client = send(engine, req(prompt, 2, n_probs=2, prompt_probs=True, cache_prompt=False))
        result = client.result
        assert [[one.token.id for one in event.prompt_probs] for event in client.tokens] == [prompt, []]
        assert [one.token.id for one in result.prompt_probs] == prompt and len(result.probs) == 2
        assert math.isnan(result.prompt_probs[0].token.logprob) and len(result.prompt_probs[0].top) == 0
        for place, one in enumerate(result.prompt_probs[1:], 1):
            (answered,) = ask(engine, req(prompt[:place], 1, n_probs=97)).probs
            likely = [(p.id, p.logprob) for p in answered.top]
            assert (one.token.id, pytest.approx(one.token.logprob)) in [(i, pytest.approx(p)) for i, p in likely]
            assert [(p.id, p.logprob) for p in one.top] == likely[:2]
    alone = ask(engine, req(prompt, 0, n_probs=1, prompt_probs=True, cache_prompt=False))
    assert len(alone.prompt_probs) == n_prompt and not alone.tokens
    assert ask(engine, req(prompt, 1, n_probs=1)).prompt_probs == []


def test_post_sampling_probs(make: Make) -> None:
    engine, _ = make()
    two = {"top_k": 2, "top_p": 1.0, "min_p": 0.0}
    result = ask(engine, req([1, 2, 3], 4, n_probs=5, post_sampling_probs=True, s=two))
    for item in result.probs:
        assert len(item.top) == 2 and sum(p.prob for p in item.top) == pytest.approx(1)
        assert item.token.id in {p.id for p in item.top}
    greedy = ask(engine, req([1, 2, 3], 4, n_probs=5, post_sampling_probs=True, s={"temperature": 0}))
    assert [[p.prob for p in item.top] for item in greedy.probs] == [[1.0]] * 4


def test_n_predict_zero_only_fills_the_cache(make: Make) -> None:
    engine, _ = make()
    result = ask(engine, req(list(range(1, 31)), 0))
    assert (result.tokens, result.content, result.stop_type, result.n_tokens_cached) == ([], "", "limit", 30)
    assert ask(engine, req(list(range(1, 41)), 3)).n_cached == 30


def test_seeds(make: Make) -> None:
    engine, _ = make()
    prompt = [5, 6, 7]
    first = ask(engine, req(prompt, 30))
    assert ask(engine, req(prompt, 30)).tokens == first.tokens
    assert ask(engine, req(prompt, 30, s={"seed": 8})).tokens != first.tokens
    free = ask(engine, req(prompt, 30, s={"seed": None}))
    assert ask(engine, req(prompt, 30, s={"seed": free.seed})).tokens == free.tokens
    assert ask(engine, req(prompt, 30, s={"seed": -1})).seed != ask(engine, req(prompt, 30, s={"seed": -1})).seed


def test_answer_continues_from_its_first_half(make: Make) -> None:
    """Prompt plus the first half of an answer gives the second half; recovery depends on it."""
    engine, _ = make()
    prompt = [9, 8, 7]
    whole = ask(engine, req(prompt, 20, s={"repeat_penalty": 1.2})).tokens
    half = ask(engine, req(prompt + whole[:10], 10, s={"repeat_penalty": 1.2})).tokens
    assert half == whole[10:]


def test_eog_ends_and_ignore_eos_bans(make: Make) -> None:
    tokenizer = FakeTokenizer(eog=range(0, 97, 3))
    engine, _ = make(tokenizer=tokenizer)
    result = ask(engine, req([1, 2], 200, s={"ignore_eos": False}))
    assert result.stop_type == "eos" and result.tokens[-1] % 3 == 0 and result.n_predicted < 200
    assert all(token % 3 for token in result.tokens[:-1]) and len(result.content) == result.n_predicted - 1
    special = ask(engine, req([1, 2], 200, s={"ignore_eos": False}, special=True))
    assert special.content == result.content + "<end>"
    assert all(token % 3 for token in ask(engine, req([1, 2], 200)).tokens)


def test_full_context_ends_the_answer(make: Make) -> None:
    engine, _ = make(n_ctx=40)
    result = ask(engine, req([3] * 30, -1))
    assert (result.stop_type, result.truncated, result.n_prompt + result.n_predicted) == ("limit", True, 40)
    result = ask(engine, req([3] * 39, -1))
    assert (result.stop_type, result.truncated, result.n_predicted) == ("limit", True, 1)
    with pytest.raises(ContextExceeded, match=r"request \(40 tokens\) exceeds the available .* \(40 tokens\)") as e:
        engine.submit(req([3] * 40), Client())
    assert (e.value.n_prompt_tokens, e.value.n_ctx) == (40, 40)


def test_bad_requests_are_refused_at_once(make: Make) -> None:
    engine, _ = make(n_slots=2)
    nan = {"temperature": math.nan}
    for bad in (req([]), req([97]), req([-1]), req([1], id_slot=2), req([1], -2), req([1], s=nan)):
        with pytest.raises(InvalidRequest):
            engine.submit(bad, Client())


# -- text ----------------------------------------------------------------------------------------------------------


def scripted(make: Make, pieces: list[bytes], **kw: Any) -> Client:
    """An engine that must answer with these pieces: each token's logit bias bans all but the next piece's token."""
    tokenizer = FakeTokenizer({i + 1: piece for i, piece in enumerate(pieces)})
    engine, forward = make(tokenizer=tokenizer, n_vocab=len(pieces) + 1)
    run = forward.run
    count = itertools.count(1)

    def scripted_run(*args: Any) -> Any:
        rows = run(*args)
        for row in rows:
            row[:] = -100
            row[min(next(count), len(pieces) + 1) % (len(pieces) + 1)] = 100
        return rows

    forward.run = scripted_run  # type: ignore[method-assign]
    client = send(engine, Request(prompt=[1], params=GenerationParams(sampling=Sampling(temperature=0), **kw)))
    client.wait()
    return client


def test_stop_string_across_tokens_is_held_back_and_cut(make: Make) -> None:
    client = scripted(make, [b"Hello ", b"wor", b"ld. E", b"N", b"D of it", b"more"], stop=["END"])
    assert [e.text for e in client.tokens] == ["Hello ", "wor", "ld. ", "", ""]
    result = client.result
    assert (result.content, result.stop_type, result.stopping_word) == ("Hello world. ", "word", "END")


def test_partial_stop_string_is_released(make: Make) -> None:
    client = scripted(make, [b"a EN", b"D", b"EN", b"Dx", b"y EN"], stop=["ENDEND!"])
    assert [e.text for e in client.tokens] == ["a ", "", "", "ENDENDx", "y ", "EN"]
    assert (client.result.content, client.result.stop_type) == ("a ENDENDxy EN", "eos")


def test_the_first_of_several_stop_strings_wins(make: Make) -> None:
    client = scripted(make, [b"one two three"], stop=["three", "two", "tw", "", "zzz"])
    assert (client.result.content, client.result.stopping_word) == ("one ", "two")


def test_utf8_characters_are_never_split(make: Make) -> None:
    text = "né🦙 日本"
    client = scripted(make, [bytes([b]) for b in text.encode()])
    for event in client.tokens:
        assert "�" not in event.text
    assert client.text == client.result.content == text
    assert len(client.tokens) == len(text.encode()) + 1


def test_stop_string_inside_bytes_of_characters(make: Make) -> None:
    client = scripted(make, [bytes([b]) for b in "ab🦙cd🦉ef".encode()], stop=["d🦉e"])
    assert (client.text, client.result.content, client.result.stop_type) == ("ab🦙c", "ab🦙c", "word")


def test_broken_utf8_at_the_end_becomes_a_replacement_character(make: Make) -> None:
    client = scripted(make, [b"a", "日".encode()[:2]], n_predict=2)
    assert client.text == client.result.content == "a�"


def test_held_back_text_is_sent_at_the_limit(make: Make) -> None:
    client = scripted(make, [b"ab", b"cd", b"ef"], stop=["cdefgh"], n_predict=3)
    assert [e.text for e in client.tokens] == ["ab", "", "cdef"]


def test_indent_limit(make: Make) -> None:
    client = scripted(make, [b"def f():\n", b"    x", b" = 1\n  ", b"  y\n", b"z = 3", b"!!"], n_indent=4)
    assert client.text == client.result.content == "def f():\n    x = 1\n    y\n"
    assert client.result.stop_type == "limit" and client.result.has_new_line


def test_time_limit_stops_at_a_newline(make: Make) -> None:
    engine, forward = make(tokenizer=FakeTokenizer({i: b"\n" if i % 4 == 0 else b"x" for i in range(1, 97)}))
    forward.before = lambda n: time.sleep(0.002)
    result = ask(engine, req([1], 1000, t_max_predict_ms=30))
    assert result.stop_type == "limit" and result.content.endswith("\n") and result.n_predicted < 500


def test_probs_of_a_stop_word_are_left_out(make: Make) -> None:
    client = scripted(make, [b"a", b"b", b"S", b"TOP"], stop=["STOP"], n_probs=1)
    assert [p.token.piece for p in client.result.probs] == [b"a", b"b"]


# -- the cache -----------------------------------------------------------------------------------------------------


def test_prefix_of_the_slot_is_reused(make: Make) -> None:
    engine, forward = make(max_batch=512)
    first = ask(engine, req(list(range(1, 51)), 10))
    forward.sizes.clear()
    follow = list(range(1, 51)) + first.tokens[:-1] + [4, 5, 6]
    result = ask(engine, req(follow, 10))
    assert (result.n_cached, result.timings.cache_n, result.timings.prompt_n) == (59, 59, 3)
    assert forward.sizes[0] == 3
    assert result.tokens == alone(req(follow, 10)).tokens

    again = ask(engine, req(follow, 10))
    assert again.n_cached == len(follow) - 1, "one token is always evaluated"
    assert again.tokens == result.tokens
    cold = ask(engine, req(follow, 10, cache_prompt=False))
    assert cold.n_cached == 0 and cold.tokens == result.tokens


def test_prefix_of_another_slot_is_shared(make: Make) -> None:
    engine, forward = make(n_slots=2, max_batch=512)
    system = [random.Random(2).randrange(1, 97) for _ in range(300)]
    ask(engine, req([*system, 1, 2, 3], 4, id_slot=0))
    forward.sizes.clear()
    result = ask(engine, req([*system, 9, 9], 4, id_slot=1))
    assert (result.id_slot, result.n_cached, forward.sizes[0]) == (1, 300, 2)
    assert [n for _, _, n in forward.copies] == [300 % 32], "all but the incomplete block"
    until(lambda: engine.snapshot().kv_cells_shared == 288)
    assert engine.snapshot().kv_cells_used == 288 + 2 * 12 + 3 + 2 + 2 * 3
    assert result.tokens == alone(req([*system, 9, 9], 4)).tokens


@pytest.mark.slow
def test_prefix_of_a_busy_slot_is_shared(make: Make) -> None:
    """Two clients share one long system prompt: it is evaluated once."""
    engine, forward = make(n_slots=3, max_batch=64)
    system = [random.Random(3).randrange(1, 97) for _ in range(400)]
    gate = threading.Event()
    forward.before = lambda n: gate.wait() and None
    clients = [send(engine, req([*system, i], 20)) for i in (1, 2, 3)]
    gate.set()
    results = [client.result for client in clients]
    assert sorted(r.n_cached for r in results) == [0, 400, 400]
    totals = settled(engine).counters
    assert (totals.prompt_tokens_total, totals.prompt_tokens_cached_total) == (401 + 1 + 1, 800)
    for i, result in zip((1, 2, 3), results, strict=True):
        assert result.tokens == alone(req([*system, i], 20)).tokens


def test_slot_choice(make: Make) -> None:
    engine, _ = make(n_slots=3)
    a, b = [1] * 40, [2] * 40
    first, second = ask(engine, req(a, 2)), ask(engine, req(b, 2))
    assert {first.id_slot, second.id_slot} == {0, 1}
    assert ask(engine, req([*a, 5], 2)).id_slot == first.id_slot, "most similar"
    assert ask(engine, req([*b, 5], 2)).id_slot == second.id_slot
    assert ask(engine, req([3] * 40, 2)).id_slot == 2, "least recently used"
    assert ask(engine, req([4] * 40, 2)).id_slot == first.id_slot, "least recently used"
    assert ask(engine, req(b, 2, id_slot=2)).id_slot == 2, "the requested slot"


def test_a_long_conversation_is_not_thrown_away_for_a_short_prefix(make: Make) -> None:
    engine, _ = make(n_slots=2)
    talk = [random.Random(4).randrange(1, 97) for _ in range(300)]
    ask(engine, req(talk, 2))
    other = ask(engine, req([*talk[:30], 5], 2))
    assert other.n_cached == 30, "the prefix was shared"
    assert ask(engine, req([*talk, 7], 2)).n_cached >= 300


# -- many requests -------------------------------------------------------------------------------------------------


def cancelling(engine: Engine, after: int) -> Client:
    client = Client()
    client.on_event = lambda event: engine.cancel(client.id) if len(client.events) > after else None
    return client


def random_request(rng: random.Random) -> Request:
    base = random.Random(rng.randrange(6))
    shared = [base.randrange(1, 97) for _ in range(rng.choice([0, 5, 40, 150]))]
    prompt = shared + [rng.randrange(1, 97) for _ in range(rng.randrange(1, 60))]
    return req(
        prompt,
        rng.choice([0, 1, 3, 20, 60]),
        cache_prompt=rng.random() < 0.8,
        id_slot=rng.randrange(3) if rng.random() < 0.1 else -1,
        stop=["aa", "q"] if rng.random() < 0.3 else [],
        n_probs=rng.choice([0, 0, 2]),
        s={
            "seed": rng.randrange(1000),
            "temperature": rng.choice([0.0, 0.8, 2.0]),
            "repeat_penalty": rng.choice([1.0, 1.3]),
            "top_k": rng.choice([0, 40]),
            "ignore_eos": rng.random() < 0.5,
        },
    )


@functools.cache
def judged(seed: int) -> list[Result]:
    """Return the answers to the requests of a seed, each alone and from scratch."""
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(N_REQUESTS)]
    options = EngineOptions(n_slots=1)
    with closing(Engine(FakeForward(1024, max_batch=512), FakeTokenizer(), options)) as judge:
        alone = [replace(one, params=replace(one.params, cache_prompt=False, id_slot=-1)) for one in requests]
        return [ask(judge, one) for one in alone]


N_REQUESTS = 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"n_slots": 8, "n_cells": 8192, "max_batch": 64},
        {"n_slots": 8, "n_cells": 1024, "max_batch": 48, "n_ctx": 700, "prefill_chunk": 16},  # not enough cells
        {"n_slots": 3, "n_cells": 512, "max_batch": 7, "n_ctx": 500},
        {"n_slots": 5, "n_cells": 4096, "max_batch": 64, "cont_batching": False},
        {"n_slots": 8, "n_cells": 4096, "max_batch": 4, "prefill_chunk": 2},  # more slots than a batch holds
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
@pytest.mark.parametrize("seed", first_of(range(2)))
def test_requests_do_not_affect_each_other(make: Make, shape: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(N_REQUESTS)]
    engine, _ = make(**shape)
    clients: list[Client] = []
    cancelled: set[int] = set()
    for i, request in enumerate(requests):
        if rng.random() < 0.2:
            cancelled.add(i)
            client = cancelling(engine, after=rng.randrange(5))
        else:
            client = Client()
        client.id = engine.submit(request, client)
        clients.append(client)
        if i in cancelled and rng.random() < 0.3:
            engine.cancel(client.id)
        if rng.random() < 0.1:
            time.sleep(0.003)
    for i, client in enumerate(clients):
        if i not in cancelled:
            client.wait()
    settled(engine)

    for i, (expected, client) in enumerate(zip(judged(seed), clients, strict=True)):
        got = [t for e in client.tokens for t in e.tokens]
        if i in cancelled and not client.over.is_set():
            assert got == expected.tokens[: len(got)]
            continue
        assert got == client.result.tokens == expected.tokens
        assert client.text == client.result.content == expected.content
        assert client.result.stop_type == expected.stop_type
        assert client.result.probs == expected.probs
    snapshot = engine.snapshot()
    assert not any(slot.is_processing for slot in snapshot.slots)
    spared = sum(slot.n_prompt_tokens for slot in snapshot.slots) - snapshot.kv_cells_used
    assert spared >= snapshot.kv_cells_shared >= 0 and (spared > 0) == (snapshot.kv_cells_shared > 0)
    assert not engine._queue.tasks, "tasks leaked"


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(2, 6), st.integers(1, 70))
def test_answers_do_not_depend_on_engine_sizes(seed: int, n_slots: int, n_blocks: int, max_batch: int) -> None:
    rng = random.Random(seed)
    engine = Engine(
        FakeForward(n_blocks * 256, max_batch=max_batch), FakeTokenizer(), EngineOptions(n_slots=n_slots, n_ctx=400)
    )
    judge = Engine(FakeForward(1024, max_batch=512), FakeTokenizer(), EngineOptions(n_slots=1, n_ctx=400))
    try:
        requests = [random_request(rng) for _ in range(12)]
        requests = [replace(request, params=replace(request.params, id_slot=-1)) for request in requests]
        clients = [send(engine, request) for request in requests]
        for request, client in zip(requests, clients, strict=True):
            assert client.result.tokens == ask(judge, request).tokens
    finally:
        engine.close()
        judge.close()


def test_first_come_first_served(make: Make) -> None:
    engine, forward = make(n_slots=2)
    gate = threading.Event()
    forward.before = lambda n: gate.wait() and None
    order: list[int] = []
    clients = []
    for i in range(10):
        client = Client(lambda event, i=i: order.append(i) if isinstance(event, Done) else None)  # type: ignore[misc]
        client.id = engine.submit(req([i + 1] * 5, 3), client)
        clients.append(client)
    time.sleep(0.02)
    gate.set()
    for client in clients:
        client.wait()
    assert order == list(range(10))


@pytest.mark.slow
def test_a_long_prompt_does_not_stall_the_others(make: Make) -> None:
    engine, forward = make(n_slots=2, max_batch=512, prefill_chunk=32)
    talking, asked = threading.Event(), threading.Event()
    forward.before = lambda n: (asked.wait(GUARD) and None) if talking.is_set() else None
    talker = send(engine, req([1, 2, 3], 300), lambda event: talking.set())
    talking.wait()
    sizes_before = len(forward.sizes)
    reader = send(engine, req([random.Random(5).randrange(1, 97) for _ in range(1000)], 2))
    asked.set()
    reader.wait()
    talker.wait()
    sizes = forward.sizes[sizes_before:]
    assert max(sizes) == 32, "a small batch while another request is generating"
    assert ask(engine, req([4] * 700, 1)) and max(forward.sizes[-4:]) == 512, "a full batch otherwise"


def test_prompts_wait_without_continuous_batching(make: Make) -> None:
    engine, _ = make(n_slots=2, cont_batching=False)
    talking = threading.Event()
    order: list[str] = []
    talker = send(engine, req([1, 2, 3], 100), lambda e: (talking.set(), order.append("talk"))[0])
    talking.wait()
    reader = send(engine, req([5, 6], 2), lambda e: order.append("read"))
    talker.wait()
    reader.wait()
    assert order.index("read") > len(order) - 1 - order[::-1].index("talk")


def test_cancel_frees_the_slot_at_the_next_step(make: Make) -> None:
    engine, forward = make(n_slots=1)
    started = threading.Event()
    endless = send(engine, req([1], -1), lambda e: started.set())
    forward.before = lambda n: time.sleep(0.001)
    started.wait()
    nxt = send(engine, req([2], 2))
    engine.cancel(endless.id)
    nxt.wait()
    n = len(endless.events)
    time.sleep(0.01)
    assert len(endless.events) == n and not endless.over.is_set()
    engine.cancel(endless.id)
    engine.cancel(10**9)
    settled(engine)


def test_cancel_while_waiting(make: Make) -> None:
    engine, forward = make(n_slots=1)
    gate = threading.Event()
    forward.before = lambda n: gate.wait() and None
    first = send(engine, req([1], 3))
    second = send(engine, req([2], 3))
    engine.cancel(second.id)
    gate.set()
    first.wait()
    settled(engine)
    assert second.events == []


def test_failing_receiver_does_not_affect_other_requests(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = make(n_slots=2)

    def broken(event: object) -> None:
        raise RuntimeError("receiver is gone")

    engine.submit(req([1], -1), broken)
    other = ask(engine, req([2], 30))
    assert other.tokens == alone(req([2], 30)).tokens
    settled(engine)
    assert "the receiver of task 0 failed" in caplog.text


def test_failing_forward_pass_fails_only_its_requests(make: Make) -> None:
    engine, forward = make(n_slots=4)
    bad = [False]

    def before(n: int) -> None:
        if bad[0]:
            bad[0] = False
            raise MemoryError("no memory left on the device")

    forward.before = before
    assert ask(engine, req([1, 2, 3], 3)).n_predicted == 3
    bad[0] = True
    client = send(engine, req([1, 2, 3, 4], 3)).wait()
    last = client.events[-1]
    assert isinstance(last, Failure) and isinstance(last.error, ComputeFailed)
    assert "no memory left on the device" in str(last.error)
    result = ask(engine, req([1, 2, 3, 4], 3))
    assert result.tokens == alone(req([1, 2, 3, 4], 3)).tokens, "nothing of the failed batch is reused"

    def named(n: int) -> None:
        raise ForwardError("worker 10.0.0.7 went away")

    forward.before = named
    last = send(engine, req([1], 3)).wait().events[-1]
    assert isinstance(last, Failure) and str(last.error) == "worker 10.0.0.7 went away"


def test_a_failing_copy_does_not_end_the_engine(make: Make) -> None:
    engine, forward = make(n_slots=2)
    system = [3] * 60
    ask(engine, req(system, 2, id_slot=0))

    def broken(*given: Any) -> None:
        raise ForwardError("copy failed")

    copy, forward.copy_rows = forward.copy_rows, broken  # type: ignore[method-assign]
    last = send(engine, req([*system, 1], 2, id_slot=1)).wait().events[-1]
    assert isinstance(last, Failure)
    forward.copy_rows = copy  # type: ignore[method-assign]
    assert ask(engine, req([*system, 1], 2)).tokens == alone(req([*system, 1], 2)).tokens


@pytest.mark.parametrize("blanks", ["  ", "\t\t", " \t"])
def test_tabs_and_spaces_count_as_indentation(blanks: str) -> None:
    text = AnswerText(n_indent=2)
    output = "".join(map(text.push, [b"x\n", blanks.encode() + b"y\n", blanks[:1].encode(), b"z"]))
    assert output == f"x\n{blanks}y\n{blanks[:1]}" and text.outdented


def test_close_waits_for_requests_within_its_timeout(make: Make) -> None:
    engine, forward = make(n_slots=1)
    forward.before = lambda n: time.sleep(0.001)
    clients = [send(engine, req([i + 1], 20)) for i in range(3)]
    engine.close(10)
    assert [client.result.n_predicted for client in clients] == [20] * 3
    with pytest.raises(EngineClosed):
        engine.submit(req([1]), Client())
    engine.close()


def test_close_fails_requests_after_its_timeout(make: Make) -> None:
    engine, forward = make(n_slots=1)
    forward.before = lambda n: time.sleep(0.001)
    running, waiting = send(engine, req([1], -1)), send(engine, req([2], -1))
    engine.close(0.05)
    for client in (running, waiting):
        assert isinstance(client.wait().events[-1], Failure)


def test_idle_engine_uses_no_cpu_time(make: Make) -> None:
    engine, _ = make()
    ask(engine, req([1], 2))
    settled(engine)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_snapshot_and_counters(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.engine.engine._PUBLISH_SECONDS", 0.0)
    engine, _ = make(n_slots=2, max_batch=64)
    empty = engine.snapshot()
    assert [slot.id_task for slot in empty.slots] == [-1, -1] and empty.kv_cells_total == 4096
    seen: list[Any] = []
    client = Client(lambda e: seen.append(engine.snapshot()) if isinstance(e, Token) and e.index == 5 else None)
    client.id = engine.submit(req([1] * 100, 10), client)
    result = client.result
    settled(engine)
    during = seen[0]
    slot = next(slot for slot in during.slots if slot.is_processing)
    assert (slot.id_task, slot.n_ctx, slot.n_decoded, slot.n_remain) == (client.id, 4096, 6, 4)
    assert (slot.n_prompt_tokens, slot.n_prompt_tokens_processed, slot.n_prompt_tokens_cache) == (105, 100, 0)
    assert during.requests_processing == 1 and during.requests_deferred == 0
    assert slot.request is result.request

    after = engine.snapshot()
    counters = after.counters
    assert after.requests_processing == 0 and after.kv_cells_used == 109
    assert (counters.prompt_tokens_total, counters.tokens_predicted_total) == (100, 10)
    assert (counters.tokens_predicted_steps_total, counters.n_decode_total, counters.n_busy_slots_total) == (9, 11, 11)
    assert counters.n_tokens_max == 109 and counters.prompt_seconds_total > 0
    assert counters.tokens_predicted_seconds_total == pytest.approx(result.timings.predicted_ms / 1e3)
    ask(engine, req([1] * 100, 1))
    settled(engine)
    assert engine.snapshot().counters.prompt_tokens_cached_total == 99


def test_snapshot_shows_the_end_of_a_request_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is visible even while other requests run, whose lengths are published at intervals."""
    monkeypatch.setattr("llamado.engine.engine._PUBLISH_SECONDS", 1e9)
    engine, _ = make(n_slots=2, max_batch=64)
    seen: list[int] = []
    long = Client(lambda e: seen.append(engine.snapshot().requests_processing))
    short = Client()
    long.id = engine.submit(req([1] * 10, 200), long)
    short.id = engine.submit(req([2] * 10, 3), short)
    assert long.result.n_predicted == 200 and short.result.n_predicted == 3
    # The client that gets the last token finds its request ended.
    assert [n for n, _ in itertools.groupby(seen)][-3:] == [2, 1, 0]


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_incomplete_character_is_replaced(stop: tuple[str, ...]) -> None:
    """Text or another character may follow; a character split over two tokens stays whole."""
    text = AnswerText(stop)
    pieces = [b"a", "ß".encode()[:1], b"b", "猫".encode()[:2], "猫".encode()[2:], b"c", "猫".encode()[:1]]
    assert "".join([*map(text.push, pieces), text.finish()]) == "a\ufffdb猫c\ufffd"


def test_closed_engine_frees_the_forward_pass() -> None:
    forward = FakeForward(256)
    for seed in range(4):
        engine = Engine(forward, FakeTokenizer(), EngineOptions(n_ctx=256))
        assert ask(engine, req([*range(10 + seed, 90 + seed)], 8)).n_predicted == 8
        engine.close()
