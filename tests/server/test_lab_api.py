"""Endpoints of `/lab`: off by default, link settings, and workers to kill and restart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, client_of, run, served

from llamado.errors import LlamadoError
from llamado.server.model import LabLink
from llamado.server.state import ServerState


class FakeLab:
    def __init__(self) -> None:
        self.done: list[Any] = []

    def view(self) -> list[LabLink]:
        return [LabLink("h:1", "h:2", 1.5, 0.0, None, True, True, False)]

    def set(self, links: Mapping[str, tuple[float, float, float | None]]) -> None:
        self.done.append(dict(links))

    def kill(self, endpoint: str) -> None:
        if endpoint != "h:1":
            raise LlamadoError(f"{endpoint} is no link of the lab")
        self.done.append(("kill", endpoint))

    def start(self, endpoint: str) -> None:
        self.done.append(("start", endpoint))


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


def ask(engine: FakeEngine, lab: FakeLab | None, method: str, path: str, body: Any = None) -> httpx.Response:
    async def work() -> httpx.Response:
        async with client_of(ServerState(served=served(engine), lab=lab)) as http:
            return await http.request(method, path, json=body)

    response: httpx.Response = run(work())
    return response


def test_the_lab_is_disabled_by_default(engine: FakeEngine) -> None:
    assert ask(engine, None, "GET", "/lab").json() == {"on": False, "links": []}
    for path in ("/lab/links", "/lab/kill", "/lab/start"):
        answer = ask(engine, None, "POST", path, {"links": [], "endpoint": "h:1"})
        assert answer.status_code == 501 and "--lab" in answer.json()["error"]["message"]


def test_links_are_set_and_workers_killed(engine: FakeEngine) -> None:
    lab = FakeLab()
    links = [{"endpoint": "h:1", "latency_ms": 20}, {"endpoint": "h:2", "jitter_ms": 2.5, "bandwidth": 1e6}]
    answer = ask(engine, lab, "POST", "/lab/links", {"links": links})
    assert answer.json() == {
        "on": True,
        "links": [
            {"endpoint": "h:1", "worker": "h:2", "latency_ms": 1.5, "jitter_ms": 0.0, "bandwidth": None, "own": True,
             "running": True, "watched": False}
        ],
    }  # fmt: skip
    ask(engine, lab, "POST", "/lab/kill", {"endpoint": "h:1"})
    ask(engine, lab, "POST", "/lab/start", {"endpoint": "h:1"})
    settings = {"h:1": (20.0, 0.0, None), "h:2": (0.0, 2.5, 1e6)}
    assert lab.done == [settings, ("kill", "h:1"), ("start", "h:1")]
    assert ask(engine, lab, "POST", "/lab/kill", {"endpoint": "h:9"}).status_code == 400


@pytest.mark.parametrize(
    "links",
    [None, {}, [1], [{}], [{"endpoint": 1}], [{"endpoint": "h:1", "latency_ms": -1}],
     [{"endpoint": "h:1", "latency_ms": True}], [{"endpoint": "h:1", "jitter_ms": "2"}],
     [{"endpoint": "h:1", "bandwidth": -5}]],
)  # fmt: skip
def test_invalid_links_are_rejected(engine: FakeEngine, links: Any) -> None:
    lab = FakeLab()
    assert ask(engine, lab, "POST", "/lab/links", {"links": links}).status_code == 400
    assert not lab.done
