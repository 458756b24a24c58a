"""Resumable streams behind a gateway: each belongs to a replica."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from stand_ins import RunningGateway, StandIn
from waiting import GUARD, until

sys.path.append(str(Path(__file__).parents[1] / "server"))

from fakes import ANSWER
from resumable import BODY, GatedEngine, post, read_some, text_of
from wire import Wire, serving

from llamado.gateway.options import KeyOptions
from llamado.http import exchange
from llamado.http.access import AccessRules

ID = {"conv_id": "c"}
Two = tuple[dict[str, Wire], dict[str, GatedEngine], RunningGateway]


@pytest.fixture
def two(start_gateway: Callable[..., RunningGateway]) -> Iterator[Callable[..., Two]]:
    """Start a gateway in front of two servers, `a` and `b`, whose answers stop after three tokens."""
    with contextlib.ExitStack() as stack:

        def start(replica: dict[str, Any] | None = None, **options: Any) -> Two:
            engines = {name: GatedEngine(allowed=3) for name in "ab"}
            wires = {name: stack.enter_context(serving(engine, **(replica or {}))) for name, engine in engines.items()}
            for engine in engines.values():
                stack.callback(engine.allow)
            replicas = [SimpleNamespace(url=wire.url, name=name) for name, wire in wires.items()]
            return wires, engines, start_gateway(*replicas, **options)

        yield start


def ask(gateway: RunningGateway, id: bytes = b"c", headers: bytes = b"", **more: Any) -> Any:
    url = urlsplit(gateway.url)
    return post((str(url.hostname), int(url.port or 0)), id, body=BODY | more, headers=headers)


def owner(gateway: RunningGateway) -> str:
    """Return the replica that works on a request."""
    (name,) = [name for name, state in gateway.states().items() if state["in_flight"]]
    return name


def states(gateway: RunningGateway) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gateway.http.post(
        "/v1/streams/lookup", json={"conversation_ids": ["c", "none"]}
    ).json()
    return found


@pytest.mark.slow
def test_a_replica_answers_on_without_its_client(two: Callable[..., Two]) -> None:
    _, engines, gateway = two()
    with ask(gateway) as sock:
        read_some(sock)
    name = owner(gateway)
    bodies: list[bytes] = []
    reading = threading.Thread(target=lambda: bodies.append(gateway.http.get("/v1/stream", params=ID).content))
    reading.start()
    assert [state["is_done"] for state in states(gateway)] == [False]
    assert gateway.states()[name]["in_flight"] == 1  # its reader does not count
    engines[name].allow()
    reading.join(GUARD)
    assert text_of(bodies[0]) == ANSWER and not engines[name].cancelled
    gateway.until(name, in_flight=0)
    assert gateway.http.get("/v1/stream", params=ID | {"from": 9}).content == bodies[0][9:]
    assert gateway.http.delete("/v1/stream", params=ID).status_code == 204
    assert gateway.http.get("/v1/stream", params=ID).status_code == 404 and states(gateway) == []


@pytest.mark.slow
def test_streams_are_stopped_and_replaced(two: Callable[..., Two]) -> None:
    """A request with the same id replaces the stream, even if another replica gets it."""
    wires, engines, gateway = two()
    with ask(gateway) as sock:
        read_some(sock)
    first = owner(gateway)
    gateway.admin("POST", "/gateway/drain", replica=first)
    with ask(gateway) as sock:
        read_some(sock)
        until(lambda: engines[first].cancelled)
        gateway.until(first, in_flight=0)
        second = owner(gateway)
        assert second != first and len(states(gateway)) == 1
        assert gateway.http.delete("/v1/stream", params=ID).status_code == 204
        until(lambda: engines[second].cancelled)
    assert not any(len(wire.state.streams) for wire in wires.values())


@pytest.mark.slow
def test_without_the_header_a_disconnect_cancels(two: Callable[..., Two]) -> None:
    _, engines, gateway = two()
    with ask(gateway, b"") as sock:
        read_some(sock)
        name = owner(gateway)
    until(lambda: engines[name].cancelled)


@pytest.mark.slow
def test_failover_leaves_no_answer_behind(stand_in: Any, start_gateway: Any) -> None:
    """The replica that lost the request gets a stop, and the stream belongs to the next one."""
    a, b = stand_in("a"), stand_in("b")
    gateway = start_gateway(a, b)
    stopped: list[str] = []

    def note(replica: StandIn) -> None:
        look = replica._look

        def noting(path: str, query: str, writer: Any) -> None:
            if path == "/v1/stream":
                stopped.append(f"{replica.name} {query}")
            look(path, query, writer)

        replica._look = noting  # type: ignore[method-assign]

    note(a)
    note(b)
    a.drop = 10
    with ask(gateway) as sock:
        assert b'"b"' in read_some(sock, b"}")
    until(lambda: stopped)
    assert stopped == ["a conv_id=c"]


@pytest.mark.slow
def test_a_request_that_waits_for_a_replica_can_be_stopped(two: Callable[..., Two]) -> None:
    _, engines, gateway = two()
    for name in "ab":
        gateway.admin("POST", "/gateway/drain", replica=name)
    with ask(gateway) as sock:
        until(lambda: gateway.http.get("/v1/stream", params=ID).status_code == 503)
        assert [state["total_bytes"] for state in states(gateway)] == [0]
        assert gateway.http.delete("/v1/stream", params=ID).status_code == 204
        assert b"cancelled by a stop" in read_some(sock, b"}}")
    assert not any(engine.requests for engine in engines.values())


@pytest.mark.slow
def test_a_detached_answer_is_charged(two: Callable[..., Two]) -> None:
    """The key is charged for all tokens at the end, although the client left and read the stream by GET."""
    keys = (KeyOptions(name="k", key="secret", tokens_per_day=10_000),)
    _, engines, gateway = two(keys=keys)
    with ask(gateway, headers=b"Authorization: Bearer secret\r\n") as sock:
        read_some(sock)
    gateway.http.headers["authorization"] = "Bearer secret"
    name = owner(gateway)
    usage = gateway.server.gateway._limits.usages[0]
    engines[name].allow()
    gateway.until(name, in_flight=0)
    assert text_of(gateway.http.get("/v1/stream", params=ID).content) == ANSWER
    until(lambda: usage.tokens > len(ANSWER.encode()))
    del gateway.http.headers["authorization"]
    assert gateway.http.get("/v1/stream", params=ID).status_code == 401


@pytest.mark.slow
def test_an_answer_without_an_end_is_left(two: Callable[..., Two], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway does not read forever for a client that is gone; then the replica can stop the answer, too."""
    monkeypatch.setattr(exchange, "MOST_UNREAD", 1000)
    wires, engines, gateway = two()
    with ask(gateway) as sock:
        read_some(sock)
    name = owner(gateway)
    stream = wires[name].state.streams.find(b"c")
    assert stream is not None and stream.n_readers == 1
    engines[name].allow(15)
    until(lambda: not stream.n_readers)
    gateway.until(name, in_flight=0)


@pytest.mark.slow
def test_the_client_s_key_stops_streams(two: Callable[..., Two]) -> None:
    _, engines, gateway = two({"access": AccessRules(api_keys=(b"secret",))}, ready=False)
    gateway.http.headers["authorization"] = "Bearer secret"
    with ask(gateway, headers=b"Authorization: Bearer secret\r\n") as sock:
        read_some(sock)
    name = owner(gateway)
    claim = gateway.server.gateway.streams._claims[b"c"]
    with gateway.http.stream("GET", "/v1/stream", params=ID) as reader:
        parts = reader.iter_raw()  # dropping it closes the connection
        next(parts)
        assert claim.n_readers == 1
    until(lambda: not claim.n_readers)
    del gateway.http.headers["authorization"]
    assert gateway.http.delete("/v1/stream", params=ID).status_code == 401
    with ask(gateway) as sock:
        assert b"Invalid API Key" in read_some(sock, b"}}")
    gateway.http.headers["authorization"] = "Bearer secret"
    assert len(states(gateway)) == 1 and not engines[name].cancelled
    assert gateway.http.delete("/v1/stream", params=ID).status_code == 204
    until(lambda: engines[name].cancelled)


@pytest.mark.slow
def test_a_shutdown_does_not_wait_for_detached_answers(
    two: Callable[..., Two], caplog: pytest.LogCaptureFixture
) -> None:
    """The replicas stop them: no client can resume them through this gateway any more."""
    _, engines, gateway = two()
    with ask(gateway) as sock:
        read_some(sock)
    name = owner(gateway)
    access = gateway.server.access
    gateway.server.should_exit = True
    until(lambda: access.draining and not access.n_running)
    assert "unfinished" not in caplog.text  # what is left at the end of the grace period
    until(lambda: engines[name].cancelled)
