"""The order in which waiting prompts are evaluated, counted in tokens evaluated before each answer starts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import pytest

from llamado.engine.engine import Engine
from llamado.engine.options import EngineOptions
from llamado.engine.request import Event, GenerationParams, Request, Token
from llamado.engine.sampling.params import Sampling

from .fake import Client, FakeForward, FakeTokenizer, send


class PromptQueue:
    """An engine whose requests all arrive before it starts; counts the tokens evaluated when each answer starts."""

    def __init__(self, pace: float, n_slots: int = 9) -> None:
        """`pace` is the prompt speed in tokens per second that the engine assumes."""
        self.forward = FakeForward(32768, max_batch=512)
        self.engine = Engine(self.forward, FakeTokenizer(), EngineOptions(n_slots=n_slots, n_ctx=8192))
        self.gate, started = threading.Event(), threading.Event()
        self.forward.before = lambda n: (started.set(), self.gate.wait())[0]
        self.tokens: dict[int, int] = {}
        self._clients = [self._send(-1, [5], 1)]
        started.wait()  # the engine is busy with a request that ends before the others start
        self.engine._stats.prompt_pace = pace
        self.engine._stats.evaluated = lambda *counts: None  # type: ignore[method-assign]

    def _send(self, number: int, prompt: list[int], n_predict: int) -> Client:
        def began(event: Event) -> None:
            if isinstance(event, Token):
                self.tokens.setdefault(number, sum(self.forward.sizes))

        sampling = Sampling(seed=7, ignore_eos=True)
        return send(
            self.engine, Request(prompt=prompt, params=GenerationParams(n_predict=n_predict, sampling=sampling)), began
        )

    def ask(self, lengths: Sequence[int]) -> None:
        for n in lengths:
            number = len(self._clients) - 1
            prompt = random.Random(number).choices(range(1, 97), k=n)
            self._clients.append(self._send(number, prompt, 4))

    def counts(self) -> list[int]:
        self.gate.set()
        for client in self._clients:
            client.wait()
        self.engine.close()
        return [count - self.forward.sizes[0] for number, count in sorted(self.tokens.items()) if number >= 0]


def test_short_prompts_do_not_wait_for_the_last_one() -> None:
    queue = PromptQueue(pace=1e9)
    queue.ask([64] * 8)
    counts = queue.counts()
    assert counts == sorted(counts) and counts[0] == 3 * 64, "prompts that fill a batch do not wait"
    assert counts[-1] == 8 * 64 + 9, "and the last waits only for the others"


def test_prompts_are_evaluated_one_after_the_other() -> None:
    queue = PromptQueue(pace=1e9)
    queue.ask([500] * 4)
    for i, count in enumerate(queue.counts()):
        # Besides the earlier prompts: tokens of answers that started meanwhile, and the padding of a batch.
        assert count <= 500 * (i + 1) + 4 * i + 32


def test_last_chunk_is_not_filled_with_another_prompt() -> None:
    queue = PromptQueue(pace=1e9)
    queue.ask([600, 600])
    assert queue.counts()[0] == 600
    assert queue.forward.sizes[1:3] == [320, 280]


def test_short_prompt_overtakes_a_long_one() -> None:
    queue = PromptQueue(pace=1000.0)
    queue.ask([3000, 100, 50])
    long, short, shortest = queue.counts()
    assert shortest == short == 192, "both, and a piece of the long one"
    assert long >= 3150


def test_long_prompt_is_overtaken_only_for_a_limited_time() -> None:
    queue = PromptQueue(pace=1000.0)
    queue.ask([300])
    time.sleep(0.4)  # it would have been evaluated by now
    queue.ask([50] * 6)
    long, *short = queue.counts()
    assert long == 300 < min(short)


@pytest.mark.parametrize("pace", [0.0, 1000.0])
def test_waiting_prompts_lose_no_tokens(pace: float) -> None:
    lengths = random.Random(3).choices(range(1, 1200), k=9)
    queue = PromptQueue(pace)
    queue.ask(lengths)
    assert len(queue.counts()) == len(lengths)
    assert sum(queue.forward.sizes) == 1 + sum(lengths) + 3 * len(lengths)
