"""Models over a ring of linked workers: every token as without links."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tiers import first_of
from tiny_models import make_llama
from waiting import GUARD, until
from wire_client import running

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.split.placement import SplitOptions
from llamado.engine.forward.ring import _acyclic
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions
from llamado.rpc.endpoint import Endpoint
from llamado.rpc.tap.proxy import Tap, TapOptions
from llamado.rpc.worker.server import Worker

N_CTX = 512
LONG = 150
"""Tokens of answers in the middle of which something happens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("m") / "m.gguf", n_embd=256, n_ff=512, n_layer=6, n_ctx=N_CTX)


@contextmanager
def worker(**options: Any) -> Iterator[Worker]:
    cpu = CpuDevice(1)
    with running(cpu, mem=1 << 30, **options) as one:
        yield one
    cpu.close()


@contextmanager
def workers(n: int) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        yield [stack.enter_context(worker()) for _ in range(n)]


def loaded(model: Path, endpoints: Sequence[object], **more: Any) -> LoadedModel:
    split = None
    if endpoints:
        split = SplitOptions(rpc=tuple(map(str, endpoints)), tensor_split=(1.0,) * len(endpoints), **more)
    options = EngineOptions(n_ctx=8 * N_CTX, n_slots=8, n_threads=1, split=split, drafts=DraftOptions(kinds=()))
    return LoadedModel.load(model, options)


PROMPTS = [[1, 2, 3], [5, 9, 17, 4, 8], [7] * 40, [*range(1, 200)], [2, 2, 2], [300, 1], [9, 8, 7], [60] * 9]


def answers(llama: LoadedModel, n: int = 24) -> list[list[int]]:
    """Return the answers of all prompts at once."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    errors: list[BaseException] = []

    def ask(i: int) -> None:
        try:
            done = llama.complete(PROMPTS[i], n_predict=n, temperature=0.8, seed=i, ignore_eos=True)
            found[i] = [*done.tokens]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors, errors
    return found


@pytest.fixture(scope="module")
def right(model: Path) -> list[list[int]]:
    with loaded(model, ()) as llama:
        return answers(llama)


@contextmanager
def slow(n: int, latency_ms: float) -> Iterator[list[Endpoint]]:
    """Workers behind taps that delay every message."""
    with ExitStack() as stack:
        yield [
            Endpoint("127.0.0.1", stack.enter_context(Tap(
                TapOptions(listen_port=0, target_port=one.port, latency_ms=latency_ms, all=True)
            )).port)
            for one in stack.enter_context(workers(n))
        ]  # fmt: skip


def links(llama: LoadedModel) -> list[tuple[int, int]]:
    assert isinstance(llama.forward, ModelRunner)
    return llama.forward.links


def passed(llama: LoadedModel) -> dict[str, tuple[str, ...]]:
    """Return the links by endpoint."""
    assert llama.cluster is not None
    return {one.endpoint or "": one.passes_to for one in llama.cluster.view().devices}


# -- the ring ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("n", first_of([3, 2]))
def test_answers_are_equal_with_and_without_a_ring(model: Path, right: list[list[int]], n: int) -> None:
    with workers(n) as several:
        endpoints = [one.endpoint for one in several]
        with loaded(model, endpoints) as llama:
            assert links(llama) == [(i, i + 1) for i in range(1, n)]
            assert [len(to) for to in passed(llama).values()] == [0, *[1] * (n - 1), 0]
            assert answers(llama) == right
        with loaded(model, endpoints, ring=False) as llama:
            assert links(llama) == [] and answers(llama) == right


@pytest.mark.full
def test_a_ring_needs_fewer_links(model: Path, right: list[list[int]]) -> None:
    """N + 1 links for a token instead of 2 N: without a ring no token can be as fast as some are with one."""
    link, n = 0.015, 3

    def seconds(ring: bool) -> Generator[float, None, None]:
        """Return the seconds of tokens, four at a time."""
        with slow(n, 1e3 * link) as endpoints, loaded(model, endpoints, ring=ring, alive_timeout=GUARD) as llama:
            assert bool(links(llama)) == ring
            llama.complete(PROMPTS[0], n_predict=2, temperature=0.0, ignore_eos=True)
            while True:
                began = time.monotonic()
                llama.complete(PROMPTS[0], n_predict=4, temperature=0.0, ignore_eos=True)
                yield (time.monotonic() - began) / 4

    assert next(seconds(False)) >= 2 * n * link
    tokens = seconds(True)

    def is_quick() -> bool:
        ring = next(tokens)
        assert ring >= (n + 1) * link
        return ring < 2 * n * link

    until(is_quick, "each of them was as slow as without a ring")
    tokens.close()


@pytest.mark.full
def test_link_times_are_reported(model: Path) -> None:
    """Devices compute next to nothing here. Link time is attributed although this machine does not see it end."""
    with slow(2, 15) as endpoints, loaded(model, endpoints, alive_timeout=GUARD) as llama:
        assert llama.cluster is not None
        cluster = llama.cluster

        def as_expected() -> bool:
            """Compare with the prediction; on a busy machine computing takes its time, too."""
            llama.complete(PROMPTS[0], n_predict=24, temperature=0.0, ignore_eos=True)
            until(lambda: all(one.link.pulse is not None for one in cluster.view().devices if one.endpoint))
            token = cluster.view().token_seconds
            return token.link > 0.6 * token.total and token.compute < 0.3 * token.total

        until(as_expected, lambda: str(cluster.view()))


def test_no_link_leads_back() -> None:
    """Two devices that send to each other could both block until the other one reads."""
    assert _acyclic([(0, 1), (1, 2), (2, 3), (1, 2)]) == [(0, 1), (1, 2), (2, 3)]
    assert _acyclic([(0, 1), (1, 0)]) == [(0, 1)]
    assert _acyclic([(1, 2), (2, 3), (3, 1), (1, 3)]) == [(1, 2), (2, 3), (1, 3)]
    assert _acyclic([(1, 1)]) == []


@pytest.mark.slow
def test_alternating_layers(model: Path, right: list[list[int]]) -> None:
    """One worker has every other layer: one direction is linked, the other goes through this machine."""
    with workers(2) as both:
        split = SplitOptions(
            rpc=tuple(str(one.endpoint) for one in both),
            tensor_split=(1.0, 1.0),
            overrides=((r"blk\.[024]\.", "RPC1"), (r"blk\.[135]\.", "RPC0")),
        )
        options = EngineOptions(n_ctx=8 * N_CTX, n_slots=8, n_threads=1, split=split, drafts=DraftOptions(kinds=()))
        with LoadedModel.load(model, options) as llama:
            assert len(links(llama)) == 1
            assert answers(llama) == right


# -- losses ------------------------------------------------------------------------------------------------------------


class CuttableProxy:
    """A proxy to a worker. Each of its connections can be cut."""

    def __init__(self, target: Endpoint) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self._target = target
        self._open: list[tuple[socket.socket, socket.socket]] = []
        self.refuses = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refuses:
                    client.close()
                    continue
                worker = socket.create_connection(self._target.address)
                for one in (client, worker):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.append((client, worker))
                for source, target in ((client, worker), (worker, client)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    @property
    def count(self) -> int:
        return len(self._open)

    def cut(self, number: int) -> None:
        for one in self._open[number]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for number in range(self.count):
            self.cut(number)


@pytest.fixture
def way() -> Iterator[tuple[Worker, CuttableProxy, Worker]]:
    """Two workers, the second behind a proxy."""
    with workers(2) as (first, second):
        way = CuttableProxy(second.endpoint)
        yield first, way, second
        way.close()


def cut_while_answering(llama: LoadedModel, cut: Callable[[], object]) -> list[list[int]]:
    """Return all answers, with an event in the middle of them."""
    found: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: found.append(answers(llama, LONG)))
    assert llama.cluster is not None
    view = llama.cluster.view
    thread.start()
    until(lambda: view().tokens_per_second > 0)
    assert thread.is_alive(), "over before anything could happen"
    cut()
    thread.join(120)
    return found[0]


@pytest.fixture(scope="module")
def long(model: Path) -> list[list[int]]:
    with loaded(model, ()) as llama:
        return answers(llama, LONG)


@pytest.mark.full
def test_the_link_is_cut(
    way: tuple[Worker, CuttableProxy, Worker], model: Path, long: list[list[int]], caplog: Any
) -> None:
    """Both workers live: answers go on through this machine."""
    first, to_second, _ = way
    with loaded(model, [first.endpoint, to_second.endpoint]) as llama:
        assert links(llama) == [(1, 2)]
        assert cut_while_answering(llama, lambda: to_second.cut(to_second.count - 1)) == long
        assert links(llama) == [] and "the link RPC0" in caplog.text
        assert llama.cluster is not None
        assert [event.kind for event in llama.cluster.view().events] == ["lost"]
        assert answers(llama, LONG) == long and links(llama) == []


@pytest.mark.slow
@pytest.mark.parametrize("which", first_of([0, 1]))
def test_a_worker_is_lost_and_returns(model: Path, right: list[list[int]], long: list[list[int]], which: int) -> None:
    """The new connection is linked again."""
    with workers(2) as both, ExitStack() as stack:
        ways = [CuttableProxy(one.endpoint) for one in both]
        for one in ways:
            stack.callback(one.close)
        with loaded(model, [one.endpoint for one in ways], request_wait=60.0) as llama:
            assert links(llama) == [(1, 2)]

            def lose() -> None:
                ways[which].refuses = True
                for number in range(ways[which].count):
                    ways[which].cut(number)
                time.sleep(0.3)
                ways[which].refuses = False

            assert cut_while_answering(llama, lose) == long
            assert links(llama) == [(1, 2)] and answers(llama) == right


@pytest.mark.full
def test_a_worker_that_must_not_link(model: Path, right: list[list[int]], caplog: Any) -> None:
    """Answers are as without a ring; the log has one line."""
    with (
        worker(allow=("127.0.0.1/32",)) as first,
        worker(host="127.0.0.2") as second,
        loaded(model, [first.endpoint, second.endpoint]) as llama,
    ):
        assert links(llama) == [] and answers(llama) == right
        assert caplog.text.count("cannot reach RPC1") == 1
