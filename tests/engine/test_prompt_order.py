"""In which order prompts that wait together are read, counted in tokens that are evaluated before an answer begins."""

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


class Waits:
    """An engine whose clients all ask before it begins: how many tokens were evaluated when each answer began."""

    def __init__(self, pace: float, n_slots: int = 9) -> None:
        """`pace`: tokens of prompts per second that the engine believes in."""
        self.forward = FakeForward(32768, max_batch=512)
        self.engine = Engine(self.forward, FakeTokenizer(), EngineOptions(n_slots=n_slots, n_ctx=8192))
        self.gate, started = threading.Event(), threading.Event()
        self.forward.before = lambda n: (started.set(), self.gate.wait())[0]
        self.tokens: dict[int, int] = {}
        self._clients = [self._send(-1, [5], 1)]
        started.wait()  # it is at work on somebody who is done before the others begin
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


def test_short_prompts_do_not_all_begin_with_the_last_one() -> None:
    waits = Waits(pace=1e9)
    waits.ask([64] * 8)
    counts = waits.counts()
    assert counts == sorted(counts) and counts[0] == 3 * 64, "those that fill a batch well enough are not held up"
    assert counts[-1] == 8 * 64 + 9, "and the last waits for the others alone"


def test_prompts_are_read_one_after_the_other() -> None:
    waits = Waits(pace=1e9)
    waits.ask([500] * 4)
    for i, count in enumerate(waits.counts()):
        # Beside the prompts before: tokens of answers that began meanwhile, and what fills up a batch.
        assert count <= 500 * (i + 1) + 4 * i + 32


def test_a_rest_is_not_filled_up_with_another_prompt() -> None:
    waits = Waits(pace=1e9)
    waits.ask([600, 600])
    assert waits.counts()[0] == 600
    assert waits.forward.sizes[1:3] == [320, 280]


def test_a_short_prompt_passes_a_long_one() -> None:
    waits = Waits(pace=1000.0)
    waits.ask([3000, 100, 50])
    long, short, shortest = waits.counts()
    assert shortest == short == 192, "both, and a piece of the long one"
    assert long >= 3150


def test_a_long_prompt_is_passed_only_as_long_as_it_takes() -> None:
    waits = Waits(pace=1000.0)
    waits.ask([300])
    time.sleep(0.4)  # it would have been read by now
    waits.ask([50] * 6)
    long, *short = waits.counts()
    assert long == 300 < min(short)


@pytest.mark.parametrize("pace", [0.0, 1000.0])
def test_tokens_of_a_prompt_that_waits_are_not_lost(pace: float) -> None:
    lengths = random.Random(3).choices(range(1, 1200), k=9)
    waits = Waits(pace)
    waits.ask(lengths)
    assert len(waits.counts()) == len(lengths)
    assert sum(waits.forward.sizes) == 1 + sum(lengths) + 3 * len(lengths)
