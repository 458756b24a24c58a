"""A server process on loopback: loading, failure, streaming, disconnecting clients, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, events, served
from server_processes import ServerProcess
from waiting import GUARD, until
from wire import serving

from llamado.http.sockets import PortError, check_tls, listen
from llamado.server.generate import streaming
from llamado.server.generate.streaming import Generation, Mailbox

Start = Callable[..., tuple[ServerProcess, str]]


def wait_ready(url: str) -> None:
    until(lambda: httpx.get(f"{url}/health").status_code == 200, "not ready")


@pytest.mark.slow
def test_the_port_is_open_at_once_and_health_has_the_progress(fake_server: Start) -> None:
    process, url = fake_server("load=3")
    seen: list[tuple[float, str]] = []
    while (response := httpx.get(f"{url}/health")).status_code == 503:
        body = response.json()
        assert body["error"] == {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        assert body["model"]
        seen.append((body["progress"], body["stage"]))
        time.sleep(0.05)
    assert response.json() == {"status": "ok"}
    assert seen and seen == sorted(seen, key=lambda s: s[0])
    assert any(0 < progress < 1 and stage == "pretending to load" for progress, stage in seen)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.mark.slow
def test_a_failed_load_logs_the_reason_and_exits(fake_server: Start) -> None:
    process, url = fake_server("fail", "load=0.5")
    messages = set()
    try:
        while True:
            messages.add(httpx.get(f"{url}/health", timeout=60).json()["error"]["message"])
            time.sleep(0.02)
    except httpx.HTTPError:
        pass
    assert process.wait(60) == 1
    failed = "Failed to load model: the model file is broken"
    assert failed in messages and messages <= {"Loading model", failed}
    log = process.log()
    assert "error: failed to load model: the model file is broken" in log and "Traceback" not in log


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("memory", "out of memory: the model needs 9 GB"),
        ("no-memory", "out of memory"),
        ("tensor", "tensor allocation failed: RPC0 has no room for 9 GB more"),
        ("unreachable", "RPC connection failed: no response from 127.0.0.1:50052"),
        ("refused", "RPC connection failed: connection refused by 127.0.0.1:50052"),
        ("lost", "RPC connection failed: worker RPC0 is lost: it closed the connection"),
    ],
)
@pytest.mark.slow
def test_the_log_has_llama_servers_lines(fake_server: Start, kind: str, words: str) -> None:
    process, _ = fake_server(f"fail={kind}")
    assert process.wait(60) == 1
    log = process.log()
    assert f"error: failed to load model: {words}\n" in log and "Traceback" not in log


@pytest.mark.slow
def test_signal_while_loading_ends_at_once(fake_server: Start) -> None:
    process, url = fake_server("load=60")
    assert httpx.get(f"{url}/health").status_code == 503
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


@pytest.mark.slow
def test_running_answers_are_finished_after_a_signal(fake_server: Start) -> None:
    process, url = fake_server("delay=0.02")
    wait_ready(url)
    text = ""
    with httpx.stream("POST", f"{url}/completion", json={"prompt": "a", "stream": True}) as response:
        for i, chunk in enumerate(response.iter_text()):
            text += chunk
            if i == 3:
                process.send_signal(signal.SIGTERM)
    assert len(events(text)) == 51  # 50 tokens and the last chunk
    assert process.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.slow
def test_requests_while_the_last_answers_finish_get_503(fake_server: Start) -> None:
    """On an open connection, on new ones, and for probes; the running answer is completed."""
    process, url = fake_server("delay=0.05")
    wait_ready(url)
    text, answers = "", []
    with httpx.Client() as old, httpx.stream("POST", f"{url}/completion", json={"prompt": "a", "stream": True}) as long:
        assert old.get(f"{url}/health").status_code == 200
        for i, chunk in enumerate(long.iter_text()):
            text += chunk
            if i == 3:
                process.send_signal(signal.SIGTERM)
                until(lambda: httpx.get(f"{url}/health").status_code != 200)
                body = {"prompt": "b", "n_predict": 2}
                for ask in (old.post, httpx.post):
                    answers += [ask(f"{url}{path}", json=body) for path in ("/completion", "/v1/chat/completions")]
                answers += [httpx.get(f"{url}{path}") for path in ("/health", "/readyz", "/slots")]
                assert httpx.get(f"{url}/livez").status_code == 200
    for answer in answers:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5"), answer.url
        assert answer.headers["connection"] == "close"
        assert answer.json()["error"]["message"].startswith("the server is shutting down")
    assert len(events(text)) == 51 and process.wait(60) == 0


@pytest.mark.slow
def test_an_unfinished_answer_ends_with_an_error(fake_server: Start) -> None:
    """Its client gets the reason; the log has neither an error nor a disconnect."""
    process, url = fake_server("delay=0.2", "grace=2")
    wait_ready(url)
    text = ""
    with httpx.stream("POST", f"{url}/completion", json={"prompt": "a", "stream": True}) as response:
        for i, chunk in enumerate(response.iter_text()):
            text += chunk
            if i == 3:
                process.send_signal(signal.SIGTERM)
    assert "shutting down" in text.strip().splitlines()[-1], text[-200:]
    assert process.wait(60) == 0
    log = process.log()
    assert "1 request(s) unfinished; ending them with an error" in log
    assert "error:" not in log and "went away" not in log


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_without_a_first_token_gets_503(fake_server: Start, stream: bool) -> None:
    """The engine is busy with a long step, so that it cannot end the answer itself."""
    process, url = fake_server("delay=600", "grace=1")
    wait_ready(url)
    with ThreadPoolExecutor() as pool:
        body = {"prompt": "a", "stream": stream}
        answer = pool.submit(httpx.post, f"{url}/completion", json=body, timeout=GUARD)
        until(lambda: any(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json()))
        process.send_signal(signal.SIGTERM)
        assert answer.result().status_code == 503 and answer.result().headers["retry-after"] == "5"
    assert process.wait(60) == 0
    log = process.log()
    assert "error:" not in log and "went away" not in log


MESSAGES = [{"role": "user", "content": "a"}]
STOPPED = "the server is shutting down: send the request again when it is back"
OPENAI = {"error": {"code": 503, "message": STOPPED, "type": "unavailable_error"}}
LAST_EVENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/completion": ({"prompt": "a"}, OPENAI),
    "/v1/completions": ({"prompt": "a"}, OPENAI),
    "/v1/chat/completions": ({"messages": MESSAGES}, OPENAI),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 9000},
        {"type": "error", "error": {**OPENAI["error"], "type": "overloaded_error"}},
    ),
    "/v1/responses": ({"input": "a"}, {"type": "error", "message": STOPPED}),
    "/api/chat": ({"model": "fake", "messages": MESSAGES}, {"error": STOPPED}),
    "/api/generate": ({"model": "fake", "prompt": "a"}, {"error": STOPPED}),
}
"""Request and last event of a stream that the server ends, by path."""


@pytest.mark.slow
@pytest.mark.parametrize("path", LAST_EVENTS)
def test_a_second_signal_ends_answers_with_an_error(fake_server: Start, path: str) -> None:
    """In the format of each API; the log has one line for the request and no traceback."""
    fields, expected = LAST_EVENTS[path]
    process, url = fake_server("delay=0.05", "tokens=9000")
    wait_ready(url)
    lines = []
    with httpx.stream("POST", f"{url}{path}", json={**fields, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.strip():
                lines.append(line)
            if len(lines) in (12, 13):
                process.send_signal(signal.SIGINT)
    last = json.loads(lines[-1].removeprefix("data: "))
    assert expected.items() <= last.items()
    assert process.wait(60) == 0
    log = process.log()
    assert [line.endswith(STOPPED) for line in log.splitlines() if f"POST {path} " in line] == [True]
    assert "error:" not in log and "went away" not in log


@pytest.mark.slow
def test_a_client_disconnect_cancels_its_answer(fake_server: Start) -> None:
    """For whole and streamed answers; observed in `/slots`."""
    _, url = fake_server("delay=0.5", "tokens=1000")
    wait_ready(url)

    def busy() -> int:
        return sum(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json())

    for stream in (True, False):
        body = {"prompt": "a", "stream": stream}
        if stream:
            with httpx.stream("POST", f"{url}/completion", json=body) as response:
                parts = response.iter_raw()  # httpx disconnects when the last reference to this is deleted
                next(parts)
                assert busy() == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/completion", json=body, timeout=0.3)
        until(lambda: not busy())


def test_chunks_arrive_as_they_are_generated() -> None:
    """The engine generates each token after the last one arrived, so a held back token would stop the stream."""
    engine, seen = FakeEngine("x" * 10), threading.Semaphore(1)
    engine.before = lambda i: seen.acquire()
    body = {"prompt": "a", "stream": True}
    with (
        serving(engine) as wire,
        httpx.stream("POST", f"{wire.url}/completion", json=body, timeout=GUARD) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        found = []
        for part in response.iter_raw():
            found += [json.loads(event)["content"] for event in events(part.decode())]
            seen.release()
    assert found == ["x"] * 10 + [""]


@pytest.mark.slow
def test_silent_streams_are_pinged(fake_server: Start) -> None:
    _, url = fake_server("delay=1.5")
    wait_ready(url)
    body = {"prompt": "a", "n_predict": 1, "stream": True, "sse_ping_interval": 1}
    assert httpx.post(f"{url}/completion", json=body, timeout=60).text.startswith(":\n\ndata: ")


def test_health_answers_while_the_engine_works() -> None:
    """Fifty times before the first of four answers ends."""
    engine, go_on = FakeEngine(), threading.Event()
    engine.before = lambda i: go_on.wait()
    body = {"prompt": "a" * 4000}
    with serving(engine) as wire, ThreadPoolExecutor(4) as pool, httpx.Client(base_url=wire.url, timeout=GUARD) as http:
        try:
            pending = [pool.submit(httpx.post, f"{wire.url}/completion", json=body, timeout=60) for _ in range(4)]
            while engine.busy < 4:
                time.sleep(0.01)
            assert [http.get("/health").status_code for _ in range(50)] == [200] * 50
            assert not any(one.done() for one in pending)
        finally:
            go_on.set()
        assert [one.result().status_code for one in pending] == [200] * 4


@pytest.mark.slow
def test_a_used_port_is_a_named_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=rf"127\.0\.0\.1:{port}: Address already in use; .*--port"):
            listen(("127.0.0.1",), port)
        command = [sys.executable, "-m", "llamado", "serve", "-m", "nothing.gguf", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1 and "Address already in use" in done.stderr and "Traceback" not in done.stderr


def test_a_unix_socket(tmp_path: Any) -> None:
    path = str(tmp_path / "x.sock")
    (sock,) = listen((path,), 0)
    try:
        assert os.path.exists(path) and sock.getsockname() == path
    finally:
        sock.close()


def test_bad_tls_files_are_named(tmp_path: Any) -> None:
    with pytest.raises(PortError, match="--ssl-cert-file"):
        check_tls(str(tmp_path / "no.key"), str(tmp_path / "no.pem"))


async def test_one_wake_up_for_many_events() -> None:
    """Events of many streams posted while the loop is busy are delivered in one callback, in order."""
    loop = asyncio.get_running_loop()
    calls = []
    original = loop.call_soon_threadsafe

    def counting(callback: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(callback)
        return original(callback, *args, **kwargs)

    loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
    engine = FakeEngine()
    mailbox = Mailbox(loop)
    generations = [Generation(mailbox, engine, [served(engine).defaults.request([1])]) for _ in range(100)]
    from llamado.engine.request import Token

    def step() -> None:
        for i in range(3):
            for generation in generations:
                mailbox.post(generation, 0, Token(str(i), [i], None, i))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()  # the loop is blocked here
    for generation in generations:
        read = await generation.read()
        assert [event.text for _, event in read if isinstance(event, Token)] == ["0", "1", "2"]
    assert len(calls) == 1
    engine.close()


async def test_flush_waits_a_moment_for_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait does not get longer if the loop is busy."""
    waiting, delivered = threading.Event(), []

    from llamado.engine.request import Token

    mailbox = Mailbox(asyncio.get_running_loop())
    engine = FakeEngine()
    generation = Generation(mailbox, engine, [served(engine).defaults.request([1])])

    def step(event: Token) -> None:
        mailbox.post(generation, 0, event)
        waiting.set()
        mailbox.flush()
        delivered.append(len(generation._events))

    thread = threading.Thread(target=step, args=(Token("a", [1], None, 0),))
    thread.start()
    waiting.wait()
    thread.join()  # the loop is blocked here
    assert delivered == [0]
    monkeypatch.setattr(streaming, "_DELIVERY_SECONDS", 10 * GUARD)
    await asyncio.to_thread(step, Token("b", [2], None, 1))
    assert delivered == [0, 2]
    began = time.monotonic()
    for idle in (mailbox, Mailbox(asyncio.get_running_loop())):
        idle.flush()
    assert time.monotonic() - began < GUARD, "flush does not wait without posted events"
    engine.close()
