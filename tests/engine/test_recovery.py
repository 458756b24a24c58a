"""The engine when devices fail: whatever happens to the cells, no answer changes and none is lost."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiers import first_of
from waiting import GUARD, until

from llamado.devices.device import DeviceError, DeviceLost, WorkerLost
from llamado.devices.split.placement import SplitOptions
from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.drafts.suffix import Suffix
from llamado.engine.engine import Engine
from llamado.engine.errors import ComputeFailed, EngineClosed, Unavailable
from llamado.engine.forward.contract import ForwardError, Scales
from llamado.engine.options import EngineOptions
from llamado.engine.request import Away, Failure, GenerationParams, Request
from llamado.engine.sampling.params import Sampling
from llamado.engine.scheduler import outage, queue, slots
from llamado.ggml.tensor import Tensor
from llamado.models.memory import Span

from .fake import Client, FakeForward, FakeTokenizer, ask, new_engine, send

Job = tuple[Future[NDArray[np.float32]], tuple[Any, ...]]


def lost(why: str = "it closed the connection") -> DeviceLost:
    return WorkerLost("RPC0[10.0.0.7:50052]", why)


class FragileForward(FakeForward):
    """A forward pass on a device that can fail; batches are computed one after the other on a separate thread.

    `die` loses everything: batches in flight fail, the cells hold noise, and no batch starts until `restore`
    succeeds. `restore` fails `refusals` times (None: always). While `hold` is set, no batch is computed. `seed`
    None: no random delays and depths.
    """

    def __init__(self, n_cells: int = 4096, *, depth: int = 1, seed: int | None = None, **kw: Any) -> None:
        super().__init__(n_cells, **kw)
        self._depth = depth
        self._rng = random.Random(seed)
        self._restless = seed is not None
        self._noise = np.random.default_rng(seed)
        self._turn = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._computing = False
        self._lost: DeviceLost | None = None
        self._dead = False
        self._ends = False
        self.watcher = lambda: None
        self.hold = False
        self.refusals: int | None = 0
        self.refusal: Callable[[], Exception] = lambda: lost("connection refused")
        self.restored: list[bool] = []
        """The `elsewhere` argument of each attempt."""
        self.deaths = 0
        self.in_restore: Callable[[], None] = lambda: None
        self.in_copy: Callable[[], None] = lambda: None
        self.in_start: Callable[[], None] = lambda: None
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def depth(self) -> int:  # type: ignore[override]
        return self._rng.randint(1, self._depth) if self._restless else self._depth

    def lost(self) -> DeviceLost | None:
        return self._lost

    def start(
        self,
        tokens: NDArray[np.int32],
        spans: Sequence[Span],
        outputs: NDArray[np.int32],
        *,
        scales: Scales = (),
    ) -> Future[NDArray[np.float32]]:
        self.in_start()
        future: Future[NDArray[np.float32]] = Future()
        if self._lost is not None:
            raise self._lost
        placed = self.memory.place(spans)
        with self._turn:
            if self._lost is not None:
                raise self._lost
            self._jobs.append((future, (tokens.copy(), placed, outputs.copy(), scales)))
            self._turn.notify_all()
        return future

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._ends or (self._jobs and not self.hold))
                if self._ends:
                    return
                future, batch = self._jobs.popleft()
                if future.done():
                    self._turn.notify_all()  # callers wait for the batch in progress
                    continue
                rows: NDArray[np.float32] | None = None
                error: Exception | None = None
                try:
                    if self._dead:
                        raise lost()
                    rows = self.run(*batch)
                except Exception as failure:
                    error = failure
                self._computing = True
            if self._restless and self._rng.random() < 0.3:
                time.sleep(self._rng.random() * 1e-3)
            with suppress(Exception):  # cancelled, or the device failed meanwhile
                if error is not None:
                    future.set_exception(error)
                elif rows is not None:
                    future.set_result(rows)
            with self._turn:
                self._computing = False
                self._turn.notify_all()

    def copy_rows(self, tensors: Sequence[Tensor], src: int, dst: int, n: int) -> None:
        self.in_copy()
        with self._turn:
            self._turn.wait_for(lambda: self._ends or self._dead or not (self._jobs or self._computing))
            if self._dead:
                raise lost()
            super().copy_rows(tensors, src, dst, n)

    def die(self, *, late: float | None = None) -> None:
        """`late` is the delay in seconds between the first failing batch and the loss showing in `lost`."""
        with self._turn:
            if self._dead:
                return
            self._dead = True
            self.deaths += 1
            self.spoil(self._noise)
            jobs = [*self._jobs]
            self._jobs.clear()
            if late is None:
                self._lost = lost()
            self._turn.notify_all()
        for future, _ in jobs:
            with suppress(Exception):
                future.set_exception(lost())
        if late is not None:
            time.sleep(late)
            with self._turn:
                if self._dead:
                    self._lost = lost()
        self.watcher()

    def restore(self, elsewhere: bool) -> None:
        self.restored.append(elsewhere)
        self.in_restore()
        assert self._dead, "nothing was lost"
        if self.refusals is None:
            raise self.refusal()
        if self.refusals:
            self.refusals -= 1
            raise self.refusal()
        with self._turn:
            self.spoil(self._noise)
            self._lost = None
            self._dead = False

    def go_on(self) -> None:
        with self._turn:
            self.hold = False
            self._turn.notify_all()

    def end(self) -> None:
        with self._turn:
            self._ends = True
            self._turn.notify_all()


Make = Callable[..., tuple[Engine, FragileForward]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[tuple[Engine, FragileForward]] = []

    def build(
        *, n_cells: int = 4096, n_vocab: int = 97, max_batch: int = 64, depth: int = 1, **kw: Any
    ) -> tuple[Engine, FragileForward]:
        forward = FragileForward(n_cells, n_vocab=n_vocab, max_batch=max_batch, depth=depth)
        made.append((new_engine(forward, FakeTokenizer(), **kw), forward))
        return made[-1]

    yield build
    for engine, forward in made:
        forward.end()
        with suppress(Exception):
            forward.die()
        engine.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "_FIRST_PAUSE", 0.002)
    monkeypatch.setattr(outage, "_LONGEST_PAUSE", 0.02)


def req(prompt: list[int], n_predict: int = 12, **kw: Any) -> Request:
    sampling = Sampling(**{"seed": 7, "ignore_eos": True, **kw.pop("s", {})})
    return Request(prompt=prompt, params=GenerationParams(n_predict=n_predict, sampling=sampling, **kw))


def alone(request: Request, n_vocab: int = 97) -> list[int]:
    """Return the answer of an engine that does nothing else, on a device that does not fail."""
    key = repr((request, n_vocab))
    if key not in _answers:
        with closing(
            Engine(FakeForward(max_batch=512, n_vocab=n_vocab), FakeTokenizer(), EngineOptions(n_slots=1))
        ) as engine:
            _answers[key] = ask(engine, request).tokens
    return _answers[key]


_answers: dict[str, list[int]] = {}


def text(n: int, seed: int = 1, n_vocab: int = 97) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, n_vocab) for _ in range(n)]


class Clock:
    """The clock of a test's engines: it runs normally, and `skip` advances it at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._skipped = 0.0
        here = SimpleNamespace(
            monotonic=lambda: time.monotonic() + self._skipped,
            perf_counter=time.perf_counter, time=time.time, sleep=time.sleep,
        )  # fmt: skip
        for module in (queue, outage, slots):
            monkeypatch.setattr(module, "time", here)

    def skip(self, seconds: float) -> None:
        self._skipped += seconds


def failure(client: Client) -> Exception:
    last = client.wait().events[-1]
    assert isinstance(last, Failure), last
    return last.error


# -- one loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", first_of([(3, None), (1, 0.02), (1, None), (3, 0.02)], 2))
def test_answers_continue_after_a_loss(make: Make, case: tuple[int, float | None]) -> None:
    """The loss is known at once, or some time after the first batch that fails."""
    depth, late = case
    engine, forward = make(n_slots=4, depth=depth)
    half = threading.Event()
    requests = [req(text(30, i), 60) for i in range(4)]
    first = send(engine, requests[0], lambda e: half.set() if len(first.events) == 30 else None)
    others = [send(engine, request) for request in requests[1:]]
    half.wait()
    forward.refusals = 2
    forward.die(late=late)
    for request, client in zip(requests, [first, *others], strict=True):
        assert client.result.tokens == alone(request) == [t for e in client.tokens for t in e.tokens]
        assert [e.index for e in client.tokens] == list(range(60)), "a repeated or missing token"
    assert forward.restored == [False] * 3


def test_loss_during_prefill(make: Make) -> None:
    engine, forward = make(n_slots=3, depth=3, max_batch=8)
    prompts = [text(300, i) for i in range(3)]
    clients = [send(engine, req(prompt, 5)) for prompt in prompts]
    for _ in range(5):
        done = len(forward.sizes)
        until(lambda done=done: len(forward.sizes) >= done + 10)  # type: ignore[misc]
        forward.die()
        until(lambda: forward.recovery.lost() is None)
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.result.tokens == alone(req(prompt, 5))
        assert client.result.n_prompt == 300


@pytest.mark.slow
def test_loss_while_a_prefix_is_copied(make: Make) -> None:
    """The copy itself detects the loss: all cells become invalid, but no answer is lost."""
    engine, forward = make(n_slots=3)
    system = text(200)
    ask(engine, req([*system, 1], 2, id_slot=0))
    talker = send(engine, req([5], 400, id_slot=2))
    until(lambda: talker.tokens)

    def die_once() -> None:
        forward.in_copy = lambda: None
        forward.die()

    forward.in_copy = die_once
    result = ask(engine, req([*system, 9, 9], 20, id_slot=1))
    assert forward.deaths == 1
    assert result.tokens == alone(req([*system, 9, 9], 20))
    assert talker.result.tokens == alone(req([5], 400))


@pytest.mark.slow
def test_loss_while_cells_are_moved(make: Make) -> None:
    """Growing sequences in a pool that is too small: each move detects the loss."""
    engine, forward = make(n_cells=1024, n_slots=4, n_ctx=1000, max_batch=64)
    left = [2]

    def die() -> None:
        if left[0]:
            left[0] -= 1
            forward.die()

    forward.in_copy = die
    requests = [req(text(100 + 60 * i, i), 300) for i in range(4)]
    clients = [send(engine, request) for request in requests]
    for request, client in zip(requests, clients, strict=True):
        assert client.result.tokens == alone(request)
    assert left == [0]


def test_loss_at_the_start_of_a_batch(make: Make) -> None:
    engine, forward = make(n_slots=2, depth=2)
    left = [4]

    def die() -> None:
        if left[0] and len(forward.sizes) > 5 * (5 - left[0]):
            left[0] -= 1
            forward.die()

    forward.in_start = die
    requests = [req(text(20, i), 40) for i in range(2)]
    clients = [send(engine, request) for request in requests]
    for request, client in zip(requests, clients, strict=True):
        assert client.result.tokens == alone(request)
    assert left == [0] and forward.deaths == 4


def test_loss_invalidates_the_cache(make: Make) -> None:
    engine, forward = make(n_slots=2)
    talk = text(200)
    assert ask(engine, req(talk, 3)).n_cached == 0
    assert ask(engine, req([*talk, 4], 3)).n_cached == 200
    forward.die()
    again = ask(engine, req([*talk, 4, 5], 30))
    assert again.n_cached == 0 and again.tokens == alone(req([*talk, 4, 5], 30))


def test_loss_without_a_request_is_detected(make: Make) -> None:
    engine, forward = make()
    ask(engine, req([1], 2))
    forward.refusals = None
    began = time.time()
    forward.die()
    until(lambda: engine.snapshot().fault)
    fault = engine.snapshot().fault
    assert fault is not None
    assert fault.device == "RPC0[10.0.0.7:50052]" and "RPC0[10.0.0.7:50052]" in fault.message
    assert began - 1 < fault.since < time.time() + 1
    forward.refusals = 0
    until(lambda: engine.snapshot().fault is None)
    assert ask(engine, req([1, 2], 9)).tokens == alone(req([1, 2], 9))


def test_fault_contains_the_reason_of_the_failed_restore(make: Make) -> None:
    engine, forward = make()
    forward.refusals = None
    forward.refusal = lambda: DeviceError("not enough memory: CPU needs 12 MiB")
    forward.die()
    until(lambda: "needs 12 MiB" in getattr(engine.snapshot().fault, "message", ""))
    forward.refusals = 0
    until(lambda: engine.snapshot().fault is None)


def test_loss_reported_only_by_a_batch(make: Make) -> None:
    """The future fails with DeviceLost although `lost` reports no loss; the cells are invalid all the same."""
    engine, forward = make(n_slots=2)
    once = [True]

    def before(n: int) -> None:
        if once[0] and len(forward.sizes) == 20:
            once[0] = False
            forward.spoil(np.random.default_rng(5))
            raise lost()

    forward.before = before
    forward._lost = None
    restored = []
    forward.restore = restored.append  # type: ignore[method-assign]
    requests = [req(text(20, i), 40) for i in range(2)]
    clients = [send(engine, request) for request in requests]
    for request, client in zip(requests, clients, strict=True):
        assert client.result.tokens == alone(request)
    assert restored == [False]


@pytest.mark.slow
def test_loss_during_recovery(make: Make) -> None:
    """The attempt succeeds, but by then the device is lost again."""
    engine, forward = make(n_slots=2)
    client = send(engine, req(text(20), 200))
    until(lambda: len(client.tokens) > 5)
    left = [3]
    restore = forward.restore

    def flapping(elsewhere: bool) -> None:
        restore(elsewhere)
        if left[0]:
            left[0] -= 1
            forward.die()

    forward.restore = flapping  # type: ignore[method-assign]
    forward.die()
    assert client.result.tokens == alone(req(text(20), 200))
    assert left == [0] and engine.snapshot().fault is None


# -- waiting -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_requests_wait_for_a_device_up_to_the_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    engine, forward = make(n_slots=1, wait=400.0)
    running = send(engine, req([1, 2], 300))
    until(lambda: running.tokens)
    forward.refusals = None
    forward.die()
    until(lambda: engine.snapshot().fault)
    early = send(engine, req([3], 5))
    clock.skip(250.0)
    late = send(engine, req([4], 5))
    assert not early.over.wait(0.05)
    clock.skip(250.0)
    error = failure(early)
    assert isinstance(error, Unavailable) and "RPC0[10.0.0.7:50052]" in str(error)
    assert len(early.events) == 1, "only the failure"
    assert not late.over.is_set() and not running.over.is_set()
    forward.refusals = 0
    assert late.result.tokens == alone(req([4], 5))
    assert running.result.tokens == alone(req([1, 2], 300)), "a started request waits without limit"


def test_time_in_the_queue_before_the_loss_does_not_count(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    engine, forward = make(n_slots=1, wait=400.0)
    forward.hold = True
    running = send(engine, req([1, 2], 30))
    queued = send(engine, req([3], 5))
    clock.skip(600.0)
    forward.refusals = None
    forward.die()
    forward.go_on()
    until(lambda: engine.snapshot().fault)
    assert not queued.over.wait(0.1)
    forward.refusals = 0
    assert queued.result.tokens == alone(req([3], 5))
    assert running.result.tokens == alone(req([1, 2], 30))


@pytest.mark.slow
def test_layers_move_after_the_failover_time(make: Make) -> None:
    engine, forward = make(failover=0.2)
    client = send(engine, req([1, 2], 300))
    until(lambda: client.tokens)

    def refuse() -> None:
        forward.refusals = 0 if forward.restored[-1] else None

    forward.in_restore = refuse
    began = time.monotonic()
    forward.die()
    assert client.result.tokens == alone(req([1, 2], 300))
    assert time.monotonic() - began >= 0.2
    assert forward.restored[-1] and not any(forward.restored[:-1]) and len(forward.restored) > 2


def test_layers_never_move_without_failover(make: Make) -> None:
    engine, forward = make(n_slots=1)
    forward.refusals = 15
    forward.die()
    until(lambda: forward.recovery.lost() is None)
    assert forward.restored == [False] * 16
    assert ask(engine, req([1], 3)).n_predicted == 3


@pytest.mark.slow
def test_cancel_while_the_device_is_lost(make: Make) -> None:
    engine, forward = make(n_slots=2)
    clients = [send(engine, req([i + 1], 300)) for i in range(4)]
    until(lambda: clients[0].tokens)
    forward.refusals = None
    forward.die()
    until(lambda: engine.snapshot().fault)
    engine.cancel(clients[0].id)
    engine.cancel(clients[2].id)
    until(lambda: engine.snapshot().requests_processing + engine.snapshot().requests_deferred == 2)
    forward.refusals = 0
    for i in (1, 3):
        assert clients[i].result.tokens == alone(req([i + 1], 300))
    assert not clients[0].over.is_set() and clients[2].events == []


def test_cancelled_request_frees_its_slot_after_a_loss(make: Make) -> None:
    """A request is cancelled while its batch runs on a failing device; none of its cells count as cached."""
    engine, forward = make(n_slots=1, depth=3, max_batch=16)
    prompt = text(200)
    client = send(engine, req(prompt, 50))
    until(lambda: len(forward.sizes) > 3)
    forward.hold = True
    engine.cancel(client.id)
    follow = send(engine, req(prompt, 20))
    forward.die()
    forward.go_on()
    assert follow.result.tokens == alone(req(prompt, 20))


# -- closing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grace", [0.0, 10 * GUARD])
@pytest.mark.parametrize("stuck", [False, True], ids=["between attempts", "during an attempt"])
def test_close_while_the_device_is_lost(make: Make, grace: float, stuck: bool) -> None:
    engine, forward = make(n_slots=1)
    running, waiting = send(engine, req([1], 300)), send(engine, req([2], 300))
    until(lambda: running.tokens)
    gate = threading.Event()
    forward.refusals = None
    if stuck:
        forward.in_restore = lambda: gate.wait() and None
    forward.die()
    until(lambda: forward.restored)
    began = time.monotonic()
    engine.close(grace)
    assert time.monotonic() - began < GUARD, "close does not wait for requests of a lost device"
    for client in (running, waiting):
        assert isinstance(failure(client), EngineClosed)
    gate.set()


def test_loss_during_close(make: Make) -> None:
    engine, forward = make(n_slots=1)
    forward.before = lambda n: time.sleep(0.001)
    running = send(engine, req([1], -1))
    until(lambda: running.tokens)
    closer = threading.Thread(target=engine.close, args=(200.0,))
    closer.start()
    time.sleep(0.02)
    forward.refusals = None
    forward.die()
    closer.join(60)
    assert not closer.is_alive()
    assert isinstance(failure(running), EngineClosed)


# -- batches that fail without a loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", first_of([1, 4, 2], 2))
@pytest.mark.parametrize("chunk", [16, 64], ids=["in chunks", "at once"])
def test_batches_after_a_failed_batch_are_discarded(make: Make, depth: int, chunk: int) -> None:
    """Part of a prompt fails while later parts, and copies of it, are in flight."""
    engine, forward = make(n_slots=4, depth=depth, max_batch=chunk, prefill_chunk=chunk)
    system = text(60)
    bad = [True]

    def before(n: int) -> None:
        if bad[0] and n >= chunk - 4:
            bad[0] = False
            raise MemoryError("no memory left on the device")

    forward.before = before
    forward.hold = True
    requests = [req([5], 200), req([*system, 1], 5), req([*system, 2], 25)]
    clients = [send(engine, request) for request in requests]
    time.sleep(0.05)
    forward.go_on()
    ended = 0
    for client, request in zip(clients, requests, strict=True):
        if isinstance(client.wait().events[-1], Failure):
            assert isinstance(failure(client), ComputeFailed)
            ended += 1
        else:
            assert client.result.tokens == alone(request)
    assert 0 < ended < 3
    for i in range(3, 7):
        assert ask(engine, req([*system, i], 25)).tokens == alone(req([*system, i], 25)), "cached, but never computed"


@pytest.mark.parametrize("depth", [2, 4])
def test_failed_batch_of_a_cancelled_request_is_discarded(make: Make, depth: int) -> None:
    engine, forward = make(n_slots=1, depth=depth, max_batch=64)
    prompt = text(300)
    forward.hold = True
    client = send(engine, req(prompt, 5))
    until(lambda: len(forward._jobs) == depth)
    engine.cancel(client.id)
    follow = send(engine, req(prompt, 20))

    def before(n: int) -> None:
        if len(forward.sizes) == 1:  # by then the slot belongs to the other request
            forward.before = None
            raise MemoryError("no memory left on the device")

    forward.before = before
    forward.go_on()
    follow.wait()
    if isinstance(follow.events[-1], Failure):
        follow = send(engine, req(prompt, 20))
    assert follow.result.tokens == alone(req(prompt, 20))
    assert ask(engine, req([*prompt, 5], 20)).tokens == alone(req([*prompt, 5], 20))


def test_failing_preparation_does_not_affect_requests(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine, forward = make()
    ready = [0]

    def broken() -> bool:
        ready[0] += 1
        raise ForwardError("it has no room for that")

    forward.prepare_ahead = broken  # type: ignore[method-assign]
    engine._prepared = False
    for i in range(3):
        assert ask(engine, req([i + 1], 3)).n_predicted == 3
    assert ready[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_of(range(3)))
def test_draft_tokens_are_discarded_by_a_move(seed: int) -> None:
    """Sequences are moved while a batch with drafts after them is in flight; the drafts are not moved."""
    rng = random.Random(seed)
    forward = FragileForward(1024, n_vocab=4, max_batch=32, depth=5, seed=seed)
    engine = Engine(forward, FakeTokenizer(), EngineOptions(n_slots=6, n_ctx=500), drafts=DraftManager([Suffix()]))
    try:
        requests = []
        for _ in range(8):
            prompt = text(rng.randrange(50, 200), rng.randrange(100), 4)
            requests.append(req(prompt, rng.choice([100, 150]), s={"temperature": rng.choice([0.0, 0.8])}))
        clients = [send(engine, request) for request in requests]
        for request, client in zip(requests, clients, strict=True):
            assert client.result.tokens == alone(request, 4)
        assert forward.copies, "no cells were moved"
    finally:
        engine.close()
        forward.end()


# -- anything at any time ----------------------------------------------------------------------------------------------


def random_request(rng: random.Random, n_vocab: int, n_ctx: int) -> Request:
    shared = text(rng.choice([0, 5, 40, 150]), rng.randrange(4), n_vocab)
    prompt = (shared + text(rng.randrange(1, 60), rng.randrange(1000), n_vocab))[: n_ctx - 1]
    return req(
        prompt,
        rng.choice([0, 1, 3, 20, 60, 150]),
        cache_prompt=rng.random() < 0.8,
        stop=["aa", "q"] if rng.random() < 0.2 else [],
        n_probs=rng.choice([0, 0, 2]),
        s={
            "seed": rng.randrange(1000),
            "temperature": rng.choice([0.0, 0.8, 2.0]),
            "repeat_penalty": rng.choice([1.0, 1.3]),
            "top_k": rng.choice([0, 40]),
            "ignore_eos": rng.random() < 0.7,
        },
    )


@pytest.mark.full
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(2, 8), st.integers(1, 5), st.booleans())
def test_losses_in_any_schedule_do_not_change_answers(
    seed: int, n_slots: int, n_blocks: int, depth: int, drafting: bool
) -> None:
    """Devices fail at any moment while requests arrive, wait for cells, copy from each other and are cancelled."""
    rng = random.Random(seed)
    n_vocab = rng.choice([4, 97])
    n_ctx = min(400, 256 * n_blocks)
    forward = FragileForward(
        256 * n_blocks, n_vocab=n_vocab, max_batch=rng.choice([3, 16, 64]), depth=depth, seed=seed & 0xFFFF
    )
    engine = Engine(
        forward,
        FakeTokenizer(),
        EngineOptions(
            n_slots=n_slots,
            n_ctx=n_ctx,
            prefill_chunk=rng.choice([4, 256]),
            split=SplitOptions(failover=rng.choice([None, 0.0, 0.01])),
        ),
        drafts=DraftManager([Suffix()]) if drafting else None,
    )
    judge = Engine(
        FakeForward(1024, max_batch=512, n_vocab=n_vocab), FakeTokenizer(), EngineOptions(n_slots=1, n_ctx=n_ctx)
    )
    over = threading.Event()

    def havoc() -> None:
        chaos = random.Random(seed)
        while not over.wait(chaos.choice([0.001, 0.005, 0.02, 0.06])):
            forward.refusals = chaos.choice([0, 0, 1, 3])
            forward.die(late=chaos.choice([None, None, 0.0, 0.002]))

    killer = threading.Thread(target=havoc)
    try:
        requests = [random_request(rng, n_vocab, n_ctx) for _ in range(12)]
        clients: list[Client] = []
        cancelled: set[int] = set()
        killer.start()
        for i, request in enumerate(requests):
            client = Client()
            if rng.random() < 0.25:
                cancelled.add(i)
                after = rng.randrange(4)
                client.on_event = lambda e, client=client, after=after: (  # type: ignore[misc]
                    engine.cancel(client.id) if len(client.events) > after else None
                )
            client.id = engine.submit(request, client)
            clients.append(client)
            if i in cancelled and rng.random() < 0.5:
                engine.cancel(client.id)
            time.sleep(rng.choice([0.0, 0.0, 0.005]))
        calm = threading.Timer(0.5, over.set)  # some requests make no progress while devices keep failing
        calm.start()
        for i, client in enumerate(clients):
            if i not in cancelled:
                client.wait()
        over.set()
        killer.join()
        calm.cancel()
        for i, (request, client) in enumerate(zip(requests, clients, strict=True)):
            expected = ask(judge, request)
            got = [t for e in client.tokens for t in e.tokens]
            if i in cancelled and not client.over.is_set():
                assert got == expected.tokens[: len(got)]
                continue
            assert got == client.result.tokens == expected.tokens
            assert client.text == client.result.content == expected.content
            assert client.result.stop_type == expected.stop_type
            assert client.result.probs == expected.probs
        until(lambda: engine.snapshot().fault is None)
        until(lambda: not (engine.snapshot().requests_processing or engine.snapshot().requests_deferred))
        until(lambda: not engine._queue.tasks)
    finally:
        over.set()
        engine.close()
        judge.close()
        forward.end()


# -- devices that come back after their layers moved -----------------------------------------------------------------


class MovingForward(FragileForward):
    """A device whose layers can move to others; `there` is True if it can be reconnected.

    The first `refusals_to_move` moves fail.
    """

    def __init__(self, *given: Any, **kw: Any) -> None:
        super().__init__(*given, **kw)
        self.is_away = False
        self.there = False
        self.calls = self.moves = self.refusals_to_move = 0
        self.moved: list[float] = []
        """The time of each move."""

    def restore(self, elsewhere: bool) -> None:
        super().restore(elsewhere)
        self.is_away = elsewhere

    def away(self) -> tuple[Away, ...]:
        return (Away("RPC0[10.0.0.7:50052]", "connection refused", 1.0, "layer 1", {}),) if self.is_away else ()

    def call_back(self) -> None:
        self.calls += 1
        if not self.there:
            raise lost("connection refused")

    def move_back(self) -> None:
        assert self.there and self.is_away
        self.moved.append(time.monotonic())
        self.moves += 1
        self.spoil(self._noise)
        if self.refusals_to_move:
            self.refusals_to_move -= 1
            raise DeviceError("it has no room any more")
        self.is_away = False


@pytest.mark.slow
def test_moving_layers_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "llamado")
    forward = MovingForward(n_vocab=97, max_batch=64)
    forward.before = lambda n: time.sleep(0.0005)  # an answer takes longer than the moves
    engine = Engine(forward, FakeTokenizer(), EngineOptions(n_slots=2, split=SplitOptions(failover=0.0)))
    try:
        for _ in range(2):
            caplog.clear()
            forward.there = False
            client = send(engine, req(text(20), 600))
            until(lambda client=client: len(client.tokens) > 5)  # type: ignore[misc]
            forward.die()
            until(lambda: engine.snapshot().degraded and engine.snapshot().fault is None)
            error = next(record.getMessage() for record in caplog.records if record.levelname == "ERROR")
            assert error.startswith("RPC connection failed: worker RPC0[10.0.0.7:50052] is lost: it closed the conn")
            assert error.endswith("answers wait until it is back")
            assert "continuing without RPC0[10.0.0.7:50052]" in caplog.text
            calls, moves = forward.calls, forward.moves
            until(lambda calls=calls: forward.calls > calls + 2)  # type: ignore[misc]
            assert "devices: all back" not in caplog.text and forward.moves == moves
            forward.there = True
            until(lambda: not engine.snapshot().degraded)
            assert "devices: all back" in caplog.text
            assert client.result.tokens == alone(req(text(20), 600)) and forward.moves == moves + 1
        forward.die()  # and back before any layer moved
        engine._outages._failover = None
        caplog.clear()
        assert ask(engine, req(text(9), 9)).tokens == alone(req(text(9), 9))
        assert "devices: all back after" in caplog.text and "continuing without" not in caplog.text
        assert not [one for one in caplog.records if one.levelname == "WARNING"], "recovery is no warning"
    finally:
        forward.end()
        engine.close()


@pytest.mark.full
def test_failed_move_is_retried_after_a_pause(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every failed move invalidates all cells."""
    monkeypatch.setattr(outage, "_FIRST_REST", 0.3)
    forward = MovingForward(n_vocab=97, max_batch=64)
    forward.there, forward.refusals_to_move = True, 1
    engine = Engine(forward, FakeTokenizer(), EngineOptions(n_slots=2, split=SplitOptions(failover=0.0)))
    try:
        client = send(engine, req(text(20), 2000))
        until(lambda: client.tokens)
        forward.die()
        until(lambda: forward.moves == 2)
        assert forward.moved[1] - forward.moved[0] >= 0.3
        assert "layers: not moved back: it has no room any more" in caplog.text
        until(lambda: not engine.snapshot().degraded)
        assert client.result.tokens == alone(req(text(20), 2000))
    finally:
        forward.end()
        engine.close()
