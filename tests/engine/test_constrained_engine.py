"""Constrained decoding in the engine's loop: timing of masks, and failing constraints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llamado.engine.engine import Engine
from llamado.engine.errors import ConstraintFailed
from llamado.engine.options import EngineOptions
from llamado.engine.request import Failure, GenerationParams, Request
from llamado.engine.sampling.params import Sampling

from .fake import FakeForward, FakeTokenizer, ask, send


class Async(FakeForward):
    """Computes on another thread and logs events to `log`; each batch waits for `asked`, if it is set."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.asked: threading.Semaphore | None = None

    def start(self, tokens: Any, spans: Any, outputs: Any, *, scales: Any = ()) -> Future[NDArray[np.float32]]:
        future: Future[NDArray[np.float32]] = Future()
        copies = tokens.copy(), self.memory.place(spans), outputs.copy()
        self.log.append("start")

        def work() -> None:
            if self.asked is not None:
                self.asked.acquire(timeout=60)
            rows = self.run(*copies)
            self.log.append("land")
            future.set_result(rows)

        threading.Thread(target=work).start()
        return future


class Evens:
    """Allows even tokens only, and fails after `n` of them."""

    def __init__(self, log: list[str], n: int = 1000, where: str = "mask") -> None:
        self.log, self.n, self.where = log, n, where
        self.matchers: list[Evens.State] = []
        self.asked: threading.Semaphore | None = None

    def start(self) -> Evens.State:
        self.matchers.append(Evens.State(self))
        return self.matchers[-1]

    class State:
        def __init__(self, owner: Evens) -> None:
            self.owner = owner
            self.tokens: list[int] = []

        def mask(self) -> NDArray[np.uint32]:
            self.owner.log.append("mask")
            if self.owner.asked is not None:
                self.owner.asked.release()
            if self.owner.where == "mask" and len(self.tokens) >= self.owner.n:
                raise RuntimeError("lost the thread")
            return np.full(4, 0x5555_5554, np.uint32)

        def accept(self, token: int) -> None:
            self.tokens.append(token)
            if self.owner.where == "accept" and len(self.tokens) >= self.owner.n:
                raise RuntimeError("lost the thread")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def engine(log: list[str]) -> Iterator[Engine]:
    engine = Engine(Async(log), FakeTokenizer(), EngineOptions(n_slots=3))
    yield engine
    engine.close()


def req(constraint: Any, seed: int = 7, n_predict: int = 6) -> Request:
    sampling = Sampling(seed=seed, ignore_eos=True)
    return Request(
        prompt=list(range(1, 21)),
        constraint=constraint,
        params=GenerationParams(n_predict=n_predict, sampling=sampling),
    )


def test_masks_are_computed_while_devices_compute(engine: Engine, log: list[str]) -> None:
    constraint, forward = Evens(log), engine._forward
    assert isinstance(forward, Async)
    constraint.asked = forward.asked = threading.Semaphore(0)
    result = ask(engine, req(constraint))
    assert all(token % 2 == 0 and token for token in result.tokens)
    assert log == ["start", "mask", "land"] * 6, "the first during prefill"


def test_each_answer_has_its_own_matcher(engine: Engine, log: list[str]) -> None:
    constraint = Evens(log)
    clients = [send(engine, req(constraint, seed)) for seed in range(3)]
    answers = [client.result.tokens for client in clients]
    assert [matcher.tokens for matcher in constraint.matchers] == answers
    assert [ask(engine, req(constraint, seed)).tokens for seed in range(3)] == answers


@pytest.mark.parametrize("where", ["mask", "accept"])
@pytest.mark.parametrize("n", [0, 3])
def test_failing_constraint_fails_only_its_request(engine: Engine, log: list[str], where: str, n: int) -> None:
    """The answer ends with the error; the other answers are unchanged."""
    expected = ask(engine, req(None)).tokens
    clients = [send(engine, req(None)), send(engine, req(Evens(log, n, where))), send(engine, req(Evens(log)))]
    bad = clients[1].wait().events[-1]
    assert isinstance(bad, Failure) and isinstance(bad.error, ConstraintFailed)
    assert str(bad.error) == "the constraint failed: RuntimeError: lost the thread"
    assert clients[0].result.tokens == expected
    assert clients[2].result.n_predicted == 6
    assert ask(engine, req(None)).tokens == expected and engine.snapshot().requests_processing == 0
