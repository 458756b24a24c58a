"""Workers found in the network join once the model is loaded, after retries if need be, and are drained."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
from fakes import FakeEngine, served

from llamado.errors import LlamadoError
from llamado.server.ops.discovery import LanWorkers
from llamado.server.state import ServerState


class Network:
    """A listener whose announcements the test makes."""

    closed = False

    def __call__(self, found: Callable[[str, float], None], gone: Callable[[str], None]) -> Network:
        self.found, self.gone = found, gone
        return self

    def close(self) -> None:
        self.closed = True


class Members:
    def __init__(self, failures: int) -> None:
        self.done: queue.Queue[tuple[str, ...]] = queue.Queue()
        self.failures = failures

    def join(self, endpoint: str, share: float = 1.0, speeds: object = ()) -> None:
        self.done.put(("join", endpoint, f"{share:g}"))
        if self.failures:
            self.failures -= 1
            raise LlamadoError("it does not answer yet")

    def drain(self, endpoint: str) -> None:
        self.done.put(("drain", endpoint))


def test_workers_join_and_are_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.server.ops.discovery._PAUSE", 0.01)
    network, state, members, engine = Network(), ServerState(), Members(2), FakeEngine()
    lan = LanWorkers(state, network)
    coming = threading.Thread(target=network.found, args=("10.0.0.2:50052", 2.0))
    coming.start()
    assert members.done.empty() and coming.is_alive(), "the model is not loaded yet"
    state.served = served(engine, cluster=members)
    coming.join(60)
    assert [members.done.get(timeout=60) for _ in range(3)] == [("join", "10.0.0.2:50052", "2")] * 3
    network.gone("10.0.0.2:50052")
    assert members.done.get(timeout=60) == ("drain", "10.0.0.2:50052") and members.done.empty()
    lan.close()
    assert network.closed
    engine.close()


def test_closing_ends_pending_joins() -> None:
    network, state = Network(), ServerState()
    lan = LanWorkers(state, network)
    coming = threading.Thread(target=network.found, args=("10.0.0.2:50052", 1.0))
    coming.start()
    lan.close()
    coming.join(60)
    assert not coming.is_alive()
