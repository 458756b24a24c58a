"""The client against servers that are scripted, ours behind a fake engine, and the real llama-server."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from client.scripted_server import Exchange, ScriptedServer
from ports import free_port
from waiting import GUARD

from llamado.client import (
    AsyncLlamaServerClient,
    LlamaServerClient,
    Phase,
    RequestFailed,
    ServerUnavailable,
    State,
    asynchronous,
    synchronous,
)
from llamado.client.health import Backoff, StartupWatch, judge
from llamado.cluster.greeting import greet
from llamado.commands.wait import wait as waiting
from llamado.commands.wait.wait import run_wait

LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
OURS = {**LOADING, "progress": 0.25, "stage": "reading weights"}


def ready(exchange: Exchange) -> None:
    exchange.answer(200, {"status": "ok"})


def loading(exchange: Exchange) -> None:
    exchange.answer(503, LOADING)


@pytest.mark.parametrize(
    ("status", "body", "phase", "says"),
    [
        (200, {"status": "ok"}, Phase.READY, "ready"),
        (503, LOADING, Phase.LOADING, "Loading model"),
        (503, OURS, Phase.LOADING, "reading weights"),
        (503, {"status": "loading model"}, Phase.LOADING, "Loading"),
        (503, {"status": "no slot available", "slots_idle": 0}, Phase.BUSY, "slots"),
        (200, {"status": "no slot available", "slots_idle": 0}, Phase.BUSY, "slots"),
        (503, {"error": {"message": "Failed to load model: no such file"}}, Phase.UNHEALTHY, "no such file"),
        (503, {"error": {"message": "worker RPC0[a:1] is gone since 12:00:00"}}, Phase.UNHEALTHY, "RPC0"),
        (503, b"<html>Service Unavailable</html>", Phase.UNHEALTHY, "proxy"),
        (200, b"<html>Welcome to nginx!</html>", Phase.UNHEALTHY, "something else"),
        (200, {"status": "green"}, Phase.UNHEALTHY, "something else"),
        (200, b"[" * 30_000, Phase.UNHEALTHY, "something else"),
        (404, {"detail": "Not Found"}, Phase.UNHEALTHY, "404"),
        (500, {"error": {"message": "oh", "type": "server_error"}}, Phase.UNHEALTHY, "oh"),
        (503, {"error": {"message": 7}, "progress": "x"}, Phase.UNHEALTHY, "proxy"),
    ],
)
def test_judging_answers(status: int, body: Any, phase: Phase, says: str) -> None:
    state = judge(status, {"retry-after": "7"}, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (state.phase, state.retry_after) == (phase, 7.0)
    assert says in state.message
    assert state.ready == (phase in (Phase.READY, Phase.BUSY))
    assert state.progress == (0.25 if body is OURS else None)


@pytest.mark.parametrize("value", ["", "soon", "-1", "1.5", "Wed, 21 Oct 2026 07:28:00 GMT", "9" * 400])
def test_a_strange_retry_after(value: str) -> None:
    pause = judge(503, {"retry-after": value}, b"").retry_after
    assert pause is None or pause <= 3600


def test_pauses_grow_with_jitter_and_the_server_may_ask_for_more() -> None:
    backoff = Backoff(0.1, 1.0, random.Random(1))
    pauses = [backoff.pause() for _ in range(8)]
    assert all(
        0.75 * full <= pause <= full for pause, full in zip(pauses, [0.1, 0.2, 0.4, 0.8, 1, 1, 1, 1], strict=True)
    )
    assert len(set(pauses)) == 8
    assert backoff.pause(5.0) == 5.0
    backoff.reset()
    assert backoff.pause() <= 0.1


def test_a_server_that_was_loading_and_is_gone() -> None:
    watch = StartupWatch(1.0)
    gone = State(Phase.CONNECTING, "cannot connect: refused")
    assert watch.note(gone).phase is Phase.CONNECTING
    watch.note(State(Phase.LOADING, "Loading model"))
    assert watch.note(gone).phase is Phase.UNHEALTHY
    assert "refused" in watch.state.message and "log" in watch.state.message
    assert watch.pause(0.999) is not None and watch.pause(1.0) is None


class Time:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += max(seconds, 1e-6)  # what is left of a wait may be too little for the sum to show it

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Time as both clients and `llamado wait` see it."""
    time = Time()
    for module in (synchronous, asynchronous, waiting):
        monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(asynchronous, "asyncio", SimpleNamespace(sleep=time.sleep_async))
    return time


@dataclass
class WaitOutcome:
    """Outcome of a client's wait."""

    found: bool
    state: State
    states: list[State]


def wait(url: str, timeout: float, **options: Any) -> list[WaitOutcome]:
    """Both clients' waits, one after the other."""

    async def beside() -> WaitOutcome:
        states: list[State] = []
        async with AsyncLlamaServerClient(url, timeout, **options) as client:
            found = await client.wait_until_ready(lambda state, _: states.append(state))
            return WaitOutcome(found, client.state, states)

    states: list[State] = []
    with LlamaServerClient(url, timeout, **options) as client:
        found = client.wait_until_ready(lambda state, _: states.append(state))
        return [WaitOutcome(found, client.state, states), asyncio.run(beside())]


def test_nothing_listens(clock: Time) -> None:
    for waited in wait(f"http://127.0.0.1:{free_port()}", 0.4):
        assert not waited.found and waited.state.phase is Phase.CONNECTING
        assert "cannot connect" in waited.state.message
    assert clock.now == pytest.approx(0.8)


@pytest.mark.slow
def test_a_port_that_accepts_and_stays_silent(clock: Time) -> None:
    over = threading.Event()
    with ScriptedServer(lambda exchange: over.wait(60) and None) as server:
        for waited in wait(server.url, 0.1, health_check_timeout=0.2):
            assert not waited.found and waited.state.phase is Phase.CONNECTING
            assert "accepts connections" in waited.state.message
        over.set()


@pytest.mark.slow
def test_slow_answers_time_out() -> None:
    def dribble(exchange: Exchange) -> None:
        exchange.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(100):
            exchange.connection.sendall(b" ")
            time.sleep(0.02)

    with ScriptedServer(dribble) as server:
        for waited in wait(server.url, 0.5, health_check_timeout=0.2):
            assert not waited.found and waited.state.phase is Phase.CONNECTING


def test_ready_after_loading(clock: Time) -> None:
    count = iter(range(100))

    def script(exchange: Exchange) -> None:
        if next(count) % 10 < 9:
            exchange.answer(503, OURS)
        else:
            ready(exchange)

    with ScriptedServer(script) as server:
        for waited in wait(server.url, 100):
            assert waited.found and waited.state.phase is Phase.READY
            assert [state.phase for state in waited.states] == [Phase.LOADING] * 9 + [Phase.READY]
            assert waited.states[0].progress == 0.25
    # A client does not wait for a server that is ready.
    assert len(clock.pauses) == 18 and max(clock.pauses) <= StartupWatch.LONGEST


def test_503_for_ever_and_its_retry_after(clock: Time) -> None:
    with ScriptedServer(lambda exchange: exchange.answer(503, LOADING, Retry_After="7")) as server:
        for waited in wait(server.url, 20):
            assert not waited.found
            assert [state.phase for state in waited.states] == [Phase.LOADING] * 4
    assert clock.pauses == [7, 7, 6] * 2  # the last look is when the time is over


def test_a_crash_while_loading_and_a_restart() -> None:
    server = ScriptedServer(loading)
    states: list[State] = []

    def told(state: State, _: float) -> None:
        states.append(state)
        if len(states) == 3:
            server.close()
        if state.phase is Phase.UNHEALTHY and len(again) == 0:
            again.append(ScriptedServer(ready, server.port))

    again: list[ScriptedServer] = []
    with LlamaServerClient(server.url, 10) as client:
        assert client.wait_until_ready(told)
    assert list(dict.fromkeys(s.phase for s in states)) == [Phase.LOADING, Phase.UNHEALTHY, Phase.READY]
    assert "it was loading" in next(s for s in states if s.phase is Phase.UNHEALTHY).message
    again[0].close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x00\x01\x02",
    ],
)
def test_a_wrong_service(clock: Time, answer: bytes) -> None:
    with ScriptedServer(lambda exchange: exchange.connection.sendall(answer)) as server:
        for waited in wait(server.url, 0.3, health_check_timeout=30):
            assert not waited.found and waited.state.phase is Phase.UNHEALTHY
            assert "something else" in waited.state.message


def test_endless_answers_are_cut(clock: Time) -> None:
    with ScriptedServer(lambda exchange: exchange.answer(200, b"x" * 1_000_000)) as server:
        for waited in wait(server.url, 0.3):
            assert not waited.found and waited.state.phase is Phase.UNHEALTHY and "longer" in waited.state.message


def test_pauses_are_short_again_when_something_has_changed() -> None:
    watch = StartupWatch(100.0)
    for state in (State(Phase.CONNECTING, "refused"), State(Phase.LOADING, "Loading model")):
        pauses = []
        for _ in range(6):
            watch.note(state)
            pauses.append(watch.pause(0.0))
        assert pauses[0] <= StartupWatch.FIRST < pauses[-1] <= StartupWatch.LONGEST


def test_probe_timeouts() -> None:
    watch = StartupWatch(10.0)
    assert [watch.look_timeout(elapsed, 5.0) for elapsed in (0.0, 4.0, 7.0, 9.5, 11.0)] == [5, 5, 3, 1, 1]
    assert watch.look_timeout(9.9, 0.2) == 0.2


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "", "http://[::1"])
def test_no_address(url: str) -> None:
    with pytest.raises(ServerUnavailable, match="address"):
        LlamaServerClient(url)


class BlockingClient:
    """The asynchronous client, used like the other one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncLlamaServerClient(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        return partial(self._call, value) if asyncio.iscoroutinefunction(value) else value

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        found = self._runner.run(method(*arguments, **options))
        return self._iterate(found) if isinstance(found, AsyncIterator) else found

    def _iterate(self, found: AsyncIterator[Any]) -> Iterator[Any]:
        async def step() -> Any:
            return await anext(found)

        while True:
            try:
                value = self._runner.run(step())
            except StopAsyncIteration:
                return
            yield value

    def __enter__(self) -> BlockingClient:
        self._runner.run(self._client.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.__aexit__(None, None, None))
        self._runner.close()


both = pytest.mark.parametrize("make", [LlamaServerClient, BlockingClient])
Make = Callable[..., Any]


@both
def test_liveness_readiness_workload(make: Make) -> None:
    answers: dict[str, tuple[int, Any]] = {"/health": (503, LOADING)}
    with (
        ScriptedServer(lambda e: e.answer(*answers.get(e.path, (404, {})))) as server,
        make(server.url + "/") as client,
    ):
        assert client.is_alive() and not client.is_healthy() and client.workload().phase is Phase.LOADING
        answers["/health"] = 200, {"status": "ok"}
        assert client.is_healthy() and client.workload().phase is Phase.READY  # /slots: 404
        assert client.get_slot_status() is None
        answers["/slots"] = 200, [{"id": 0, "is_processing": True}, {"id": 1, "is_processing": False}]
        assert client.workload().phase is Phase.READY
        answers["/slots"] = 200, [{"id": 0, "is_processing": True}]
        assert client.workload().phase is Phase.BUSY and client.state.ready
        assert client.get_slot_status() == [{"id": 0, "is_processing": True}]
        answers["/metrics"] = 200, b'# TYPE llamacpp:x_total counter\nllamacpp:x_total{a="1"} 5\nllamacpp:y 2.5\n'
        assert client.metrics() == {'llamacpp:x_total{a="1"}': 5.0, "llamacpp:y": 2.5}
        answers["/metrics"] = 501, {"error": {"message": "start it with --metrics", "type": "not_supported_error"}}
        with pytest.raises(RequestFailed, match="--metrics") as failed:
            client.metrics()
        assert (failed.value.status, failed.value.type) == (501, "not_supported_error")
        answers["/props"] = 200, {"total_slots": 4}
        assert client.props() == {"total_slots": 4}
    with make(server.url) as client:
        assert not client.is_alive() and client.get_slot_status() is None
        with pytest.raises(ServerUnavailable, match="llamado wait"):
            client.props()


def events(*values: Any) -> bytes:
    return (
        b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values) + b": ping\n\ndata: [DONE]\n\n"
    )


@both
def test_completion_and_chat(make: Make) -> None:
    def script(exchange: Exchange) -> None:
        body = exchange.json()
        if exchange.path == "/completion":
            if body["stream"]:
                exchange.answer(200, events({"content": "a", "stop": False}, {"content": "", "stop": True}))
            else:
                exchange.answer(200, {"content": f"{body['prompt']}{body['n_predict']}"})
        elif body["stream"]:
            parts = [{"choices": [{"delta": {"content": text}}]} for text in (None, "Hi", " there")]
            exchange.answer(200, events(*parts, {"choices": [], "usage": {}}))
        else:
            exchange.answer(200, {"choices": [{"message": {"content": body["messages"][0]["content"] + "!"}}]})

    with ScriptedServer(script) as server, make(server.url, api_key="secret") as client:
        assert client.completion("x", n_predict=3) == {"content": "x3"}
        assert client.completion([1, 2], n_predict=0)["content"] == "[1, 2]0"
        assert [e["content"] for e in client.completion("x", stream=True)] == ["a", ""]
        assert client.chat("Hello") == "Hello!"
        assert client.chat([{"role": "user", "content": "Ho"}]) == "Ho!"
        assert list(client.chat("Hello", stream=True)) == ["Hi", " there"]
        assert client.chat_completion("Hello")["choices"][0]["message"]["content"] == "Hello!"
        assert len(list(client.chat_completion("Hello", stream=True))) == 4
        assert all(e.headers["authorization"] == "Bearer secret" for e in server.requests)


@both
def test_a_stream_with_an_error_and_one_that_breaks(make: Make) -> None:
    broken = b'data: {"content": "a"}\n\ndata: {"error": {"code": 500, "message": "the worker died", "type": "x"}}\n\n'
    with ScriptedServer(lambda e: e.answer(200, broken)) as server, make(server.url) as client:
        stream = client.completion("x", stream=True)
        assert next(stream) == {"content": "a"}
        with pytest.raises(RequestFailed, match="the worker died"):
            next(stream)
        server.script = lambda e: e.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata: {}\n\n")
        with pytest.raises(ServerUnavailable):
            list(client.completion("x", stream=True))
        server.script = lambda e: e.answer(200, b"data: {nonsense\n\n")
        with pytest.raises(RequestFailed, match="no JSON"):
            list(client.completion("x", stream=True))


def ask(make: Make, url: str, **options: Any) -> Any:
    with make(url, **options) as client:
        return client.completion("x")


FULL = {"error": {"message": "too many wait", "type": "unavailable_error"}}


@both
def test_a_full_server_is_asked_again(clock: Time, make: Make) -> None:
    def script(exchange: Exchange) -> None:
        if len(server.requests) < 4:
            exchange.answer(503, FULL)
        else:
            exchange.answer(200, {"content": "at last"})

    with ScriptedServer(script) as server:
        assert ask(make, server.url)["content"] == "at last"
        assert len(server.requests) == 4
    assert all(0.75 * full <= pause <= full for pause, full in zip(clock.pauses, [0.1, 0.2, 0.4], strict=True))


@pytest.mark.slow
@both
@pytest.mark.parametrize(("options", "pauses"), [({"busy_timeout": 20}, 2), ({}, 8), ({"busy_timeout": 6.9}, 0)])
def test_a_server_that_stays_full(clock: Time, make: Make, options: dict[str, Any], pauses: int) -> None:
    """Asked when it said, for as long as `busy_timeout` (60 s unless told) allows."""

    def script(exchange: Exchange) -> None:
        if len(server.requests) < 20:
            exchange.answer(503, FULL, Retry_After="7")
        else:
            exchange.answer(200, {"content": "far too late"})

    with ScriptedServer(script) as server, pytest.raises(ServerUnavailable, match="too many wait"):
        ask(make, server.url, **options)
    assert clock.pauses == [7] * pauses and len(server.requests) == pauses + 1


@both
@pytest.mark.parametrize("status", [400, 404, 429, 500, 502, 504])
def test_other_refusals_are_final(clock: Time, make: Make, status: int) -> None:
    with (
        ScriptedServer(lambda e: e.answer(status, {"error": {"message": "bad", "type": "some_error"}})) as server,
        pytest.raises(RequestFailed, match=f"{status} bad") as failed,
    ):
        ask(make, server.url)
    assert (failed.value.status, failed.value.type) == (status, "some_error")
    assert len(server.requests) == 1 and clock.pauses == []


# -- llamado wait ------------------------------------------------------------------------------------------------------


def test_plain_lines(clock: Time, capsys: pytest.CaptureFixture[str]) -> None:
    count = iter(range(100))
    with ScriptedServer(lambda e: ready(e) if next(count) > 3 else e.answer(503, OURS)) as server:
        assert run_wait(server.url, timeout=300, interval=2) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"Waiting for {server.url} to be ready (timeout: 300s)...",
        "[0/300s] Loading model: reading weights 25%",
        "Server is ready! (took 0s)",
    ]
    assert run_wait(server.url, timeout=0.3, interval=0.1) == 1
    said = capsys.readouterr()
    assert len(said.out.splitlines()) >= 3 and "cannot connect" in said.out
    assert said.err.startswith("ERROR: Timeout waiting for server") and "cannot connect" in said.err


@pytest.mark.slow
def test_the_command() -> None:
    with ScriptedServer(ready) as server:
        command = [
            sys.executable,
            "-m",
            "llamado",
            "wait",
            server.url,
            "--timeout",
            "20",
            "--interval",
            "1",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and re.fullmatch(r"Server is ready! \(took \d+s\)", done.stdout.splitlines()[-1])


def serve_bytes(answer: bytes | None) -> tuple[socket.socket, tuple[str, int]]:
    """A port whose connections get these bytes (None: silence)."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            kept.append(connection)
            if answer is not None:
                connection.recv(64)
                connection.sendall(answer)
                connection.close()

    threading.Thread(target=run, daemon=True).start()
    return listener, listener.getsockname()


@pytest.mark.parametrize(
    ("answer", "phase", "says"),
    [
        (None, Phase.CONNECTING, "does not greet"),
        (b"", Phase.UNHEALTHY, "instead of greeting"),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", Phase.UNHEALTHY, "something else"),
        ((28).to_bytes(8, "little") + bytes([7, 0, 0, 0]) + bytes(24), Phase.READY, "ready"),
        ((28).to_bytes(8, "little") + bytes([6, 0, 0, 0]) + bytes(24), Phase.UNHEALTHY, "speaks RPC 6.0.0"),
        ((28).to_bytes(8, "little") + bytes([7, 0]), Phase.UNHEALTHY, "instead of greeting"),
    ],
)
def test_workers(answer: bytes | None, phase: Phase, says: str) -> None:
    listener, address = serve_bytes(answer)
    with listener:
        state = greet(address, 0.3 if answer is None else 30)
    assert state.phase is phase and says in state.message


def test_waiting_for_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    from llamado.rpc.worker.server import Worker, WorkerOptions

    assert run_wait(f"tcp://127.0.0.1:{free_port()}", timeout=0.2, interval=1) == 1
    worker = Worker([], WorkerOptions(port=0))
    thread = threading.Thread(target=worker.serve, daemon=True)
    thread.start()
    assert run_wait(f"tcp://127.0.0.1:{worker.port}", timeout=GUARD, interval=1) == 0
    worker.stop()
    thread.join()
    assert "Server is ready!" in capsys.readouterr().out


# -- the real one ------------------------------------------------------------------------------------------------------


@pytest.mark.interop
def test_the_real_llama_server(peer_bin: Path, smollm2_path: Path) -> None:
    port = free_port()
    command = [str(peer_bin / "llama-server"), "-m", str(smollm2_path), "--port", str(port), "-c", "512", "-np", "1"]
    process = subprocess.Popen([*command, "--metrics", "-t", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with LlamaServerClient(f"127.0.0.1:{port}", 60) as client:
            phases: dict[Phase, None] = {}
            note: Callable[[State, float], None] = lambda state, _: phases.setdefault(state.phase)  # noqa: E731
            assert client.wait_until_ready(note)
            assert list(phases)[-1] is Phase.READY and Phase.UNHEALTHY not in phases
            assert client.props()["total_slots"] == 1
            assert client.metrics()["llamacpp:requests_processing"] == 0
            stream = client.completion("One two three", stream=True, n_predict=200, ignore_eos=True)
            next(stream)
            assert client.workload().phase is Phase.BUSY
            assert client.chat("Say hello", max_tokens=4)
    finally:
        process.kill()
        process.wait()
