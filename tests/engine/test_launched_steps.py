"""Launched steps: tokens are sent while the next step runs.

Answers equal those of an engine that waits for each step, whatever happens between a step's launch and its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiers import first_of
from tiny_models import make_llama
from waiting import until

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.drafts.suffix import Suffix
from llamado.engine.engine import Engine
from llamado.engine.errors import ComputeFailed, EngineClosed
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.options import EngineOptions
from llamado.engine.request import Event, Failure, GenerationParams, Request, Token
from llamado.engine.sampling.params import Sampling
from llamado.ggml.graph import Graph
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model

from .fake import Client, FakeTokenizer, ask, new_engine, send

Make = Callable[..., tuple[Engine, "CountingDevice"]]

LETTERS = FakeTokenizer({i: bytes([97 + i % 26]) for i in range(320)})


class CountingDevice(CpuDevice):
    """Counts launched steps; the step with the number `fails` is lost after its launch."""

    n = 0
    fails: int | None = None

    @property
    def launched(self) -> bool:
        """True while a launched step has not been waited for."""
        return self.team._launched

    def launch(self, graph: Graph) -> None:
        self.n += 1
        super().launch(graph)

    def finish(self) -> None:
        due = self.launched and self.n == self.fails
        super().finish()
        if due:
            self.fails = None
            raise RuntimeError("the step is lost")


class SynchronousDevice(CountingDevice):
    """Computes a step before `launch` returns."""

    def launch(self, graph: Graph) -> None:
        self.n += 1
        self.submit(graph)


class LateDevice(CountingDevice):
    """Delays the launching thread until the other threads have finished the step."""

    def finish(self) -> None:
        if self.launched:
            time.sleep(0.005)
        super().finish()


class Evens:
    """Allows even tokens only."""

    def start(self) -> Evens:
        return Evens()

    def mask(self) -> NDArray[np.uint32]:
        return np.full(10, 0x5555_5555, np.uint32)

    def accept(self, token: int) -> None:
        assert token % 2 == 0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("steps") / "m.gguf", n_embd=64, n_ff=64, n_layer=3, n_vocab=320)


@pytest.fixture
def make(path: Path, jit: Jit) -> Iterator[Make]:
    """Return a function that starts engines, each with its own device."""
    opened: list[tuple[Engine, ModelRunner]] = []

    def build(
        kind: type[CountingDevice] = CountingDevice, n_threads: int = 2, **options: Any
    ) -> tuple[Engine, CountingDevice]:
        device, file = kind(n_threads, jit=jit), GGUFFile.open(path)
        forward = ModelRunner(file, load_model(file), [device], RunnerOptions(n_cells=1024, max_batch=64))
        engine = new_engine(forward, LETTERS, **{"n_slots": 4, "n_ctx": 256, "n_threads": 2, **options})
        opened.append((engine, forward))
        return engine, device

    yield build
    for engine, forward in opened:
        engine.close()
        forward.close()
        forward.file.close()


def req(
    first: int, n_predict: int = 24, *, temperature: float = 1.0, constraint: Any = None, **options: Any
) -> Request:
    sampling = Sampling(seed=7, ignore_eos=True, temperature=temperature)
    return Request(
        prompt=list(range(first, first + 20)),
        params=GenerationParams(n_predict=n_predict, sampling=sampling, **options),
        constraint=constraint,
    )


def received(client: Client) -> list[Any]:
    """Return all events a client received, without times."""
    pieces = [(event.text, event.tokens, event.probs, event.index) for event in client.tokens]
    result = client.result
    return [*pieces, result.content, result.tokens, result.stop_type, result.stopping_word, result.truncated]


def answers(
    make: Make, kind: type[CountingDevice], requests: list[Request], **options: Any
) -> tuple[list[Any], CountingDevice]:
    """Return the events of each request, run one after the other and then concurrently."""
    engine, device = make(kind, **options)
    found = [received(send(engine, request).wait()) for request in requests]
    return found + [received(client.wait()) for client in [send(engine, request) for request in requests]], device


@pytest.mark.slow
@pytest.mark.parametrize("late", [CountingDevice, LateDevice])
@pytest.mark.parametrize("n_threads", first_of([2, 1, 3]))
def test_answers_equal_those_of_synchronous_steps(make: Make, late: type[CountingDevice], n_threads: int) -> None:
    whole = ask(make(SynchronousDevice)[0], req(40)).content
    requests = [
        req(40, stop=[whole[7:10]], n_probs=3),  # three tokens long
        req(60, constraint=Evens()),
        req(80, temperature=0.0),
        req(100, 1),
    ]
    expected, plain = answers(make, SynchronousDevice, requests)
    assert expected[0][-3:] == ["word", whole[7:10], False] and expected[0][-5] == whole[: whole.index(whole[7:10])]
    found, device = answers(make, late, requests, n_threads=n_threads)
    assert found == expected
    if late is CountingDevice and n_threads == 2:
        one_by_one = [make(kind, n_slots=1) for kind in (SynchronousDevice, CountingDevice)]
        for engine, _ in one_by_one:
            assert [received(send(engine, request).wait()) for request in requests] == expected[:4]
        assert one_by_one[0][1].n == one_by_one[1][1].n, "no extra step after the end of an answer"
    assert device.n and plain.n


@pytest.mark.slow
@pytest.mark.parametrize("options", first_of([{"drafts": True}, {"context_shift": True, "n_ctx": 32}, {"n_batch": 8}]))
def test_drafts_shifts_and_chunked_prompts_equal_synchronous_steps(make: Make, options: dict[str, Any]) -> None:
    requests = [req(40, 60), req(60, 60, temperature=0.0), req(40, 60, return_progress=True)]

    def fresh() -> dict[str, Any]:
        return {**options, "drafts": DraftManager([Suffix()])} if "drafts" in options else options

    expected, _ = answers(make, SynchronousDevice, requests, **fresh())
    for kind in (CountingDevice, LateDevice):
        assert answers(make, kind, requests, **fresh())[0] == expected


def test_tokens_are_sent_while_the_next_step_runs(make: Make) -> None:
    engine, device = make()
    launched: list[tuple[int, bool]] = []

    def note(event: Event) -> None:
        if isinstance(event, Token):
            launched.append((event.index, device.launched))

    assert send(engine, req(40, 6), note).result.n_predicted == 6
    assert launched == [(i, i < 5) for i in range(6)], "all but the last, which no step follows"
    # The same holds for an answer that ends while another request runs.
    launched.clear()
    other = send(engine, req(60, 200))
    send(engine, req(40, 6), note).wait()
    assert not other.over.is_set() and launched[-1] == (5, True)
    engine.cancel(other.id)


@pytest.mark.parametrize("spare_core", [False, True])
def test_flush_runs_while_the_next_step_computes(make: Make, monkeypatch: pytest.MonkeyPatch, spare_core: bool) -> None:
    """The callback runs once per step, while other cores compute, and only if no other core is free."""
    monkeypatch.setattr("llamado.engine.options.cores", lambda: 3 if spare_core else 2)
    engine, device = make()
    seen: list[tuple[int, bool]] = []
    clients = [Client(), Client()]

    def flush() -> None:
        seen.append((sum(len(client.tokens) for client in clients), device.launched))

    for client in clients:
        client.id = engine.submit(req(40, 6), client, flush=flush)
    for client in clients:
        client.wait()
    if spare_core:
        assert not seen
    else:
        assert seen and all(launched for _, launched in seen)
        counts = [n for n, _ in seen]
        assert counts == sorted(set(counts)), "once for all tokens of a step"
        assert counts[-1] >= 10, "in every step but the last"


@pytest.mark.parametrize("how", ["drafts", "states"])
def test_tokens_are_sent_before_slow_work(make: Make, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Tokens are sent before a draft model runs, and before a batch that is split in parts."""
    engine, device = make(drafts=DraftManager([Suffix()]) if how == "drafts" else None)
    if how == "drafts":
        monkeypatch.setattr(DraftManager, "takes_long", True)
    else:
        monkeypatch.setattr(ModelRunner, "launches", False)
    launched: list[bool] = []
    send(engine, req(40, 6), lambda event: launched.append(device.launched)).wait()
    assert launched and not any(launched)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancelled", "fails"])
def test_dropping_a_request_between_launch_and_end(make: Make, how: str) -> None:
    """The dropped client gets no more events; its neighbor, and the next request in its cells, are unaffected."""
    plain, _ = make(SynchronousDevice)
    expected = [received(send(plain, request).wait()) for request in (req(60), req(40, 30))]
    engine, device = make()
    dropped = Client()
    at: list[bool] = []

    def drop(event: Event) -> None:
        if isinstance(event, Token) and event.index == 3:
            at.append(device.launched)
            if how == "fails":
                raise RuntimeError("the client is gone")
            engine.cancel(dropped.id)

    dropped.on_event = drop
    neighbor = send(engine, req(60))
    dropped.id = engine.submit(req(40, 200), dropped)
    assert received(neighbor.wait()) == expected[0]
    until(lambda: not engine.snapshot().requests_processing)
    assert at == [True] and [event.index for event in dropped.tokens] == [0, 1, 2, 3] and not dropped.over.is_set()
    assert received(send(engine, req(40, 30)).wait()) == expected[1]


def test_dropping_a_request_from_another_requests_callback(make: Make) -> None:
    """The token of the dropped request in the same step is not sent."""
    engine, _ = make()
    other, n_received = Client(), []

    def drop(event: Event) -> None:
        if isinstance(event, Token) and event.index == 8:
            engine.cancel(other.id)
            n_received.append(len(other.tokens))

    first = Client(drop)
    first.id = engine.submit(req(60), first)
    other.id = engine.submit(req(40, 200), other)
    first.wait()
    until(lambda: not engine.snapshot().requests_processing)
    assert n_received == [len(other.tokens)] and other.tokens and not other.over.is_set()


def test_losing_a_launched_step_fails_its_requests(make: Make) -> None:
    """The client gets all earlier tokens, then the error; later requests are answered."""
    expected = received(send(make(SynchronousDevice)[0], req(40)).wait())
    engine, device = make()
    device.fails = device.n + 5
    client = send(engine, req(40)).wait()
    assert isinstance(client.events[-1], Failure) and isinstance(client.events[-1].error, ComputeFailed)
    assert [(event.text, event.tokens) for event in client.tokens] == [piece[:2] for piece in expected[:4]]
    assert received(send(engine, req(40)).wait()) == expected


@pytest.mark.parametrize("where", ["its own thread", "another thread"])
def test_closing_an_engine_with_a_launched_step(make: Make, where: str) -> None:
    """The engine closes at once, with no step in flight; another engine can use the same device."""
    expected = received(send(make(SynchronousDevice)[0], req(40)).wait())
    engine, device = make()
    launched: list[bool] = []

    def close(event: Event) -> None:
        if isinstance(event, Token) and event.index == 3:
            launched.append(device.launched)
            if where == "its own thread":
                engine.close()
            else:
                closing.start()
                time.sleep(0.02)

    closing = threading.Thread(target=engine.close)
    client = send(engine, req(40, 200), close).wait()
    assert isinstance(client.events[-1], Failure) and isinstance(client.events[-1].error, EngineClosed)
    engine._thread.join(60)
    assert not engine._thread.is_alive() and launched == [True] and not device.launched
    again = Engine(engine._forward, LETTERS, EngineOptions(n_slots=4, n_ctx=256))
    assert received(send(again, req(40)).wait()) == expected
    again.close()
