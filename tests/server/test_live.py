"""`/live/events`: its contents, its end, access, and the ring buffers behind it."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, run
from waiting import GUARD, until
from wire import Wire, serving

from llamado.engine.request import Counters, EngineSnapshot, Histogram, StoredPrompt
from llamado.http.access import AccessRules
from llamado.http.monitoring.request_log import Record, current
from llamado.server.live.live import LiveHistory
from llamado.server.live.log_tail import LogTail
from llamado.server.live.requests import RecentRequests
from llamado.server.live.samples import Samples
from llamado.server.ops.sleep import Sleep, SleepingEngine


class Listener:
    """A client of `/live/events` that merges the events as the page does."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self._headers = headers or {}
        self.url = url
        self.text = ""
        self.now: dict[str, Any] = {}
        self.gathered: dict[str, list[Any]] = {"ended": [], "log": []}
        self.seen: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Listener:
        self._connection = http.client.HTTPConnection("127.0.0.1", int(self.url.rpartition(":")[2]))
        self._connection.request("GET", "/live/events", headers=self._headers)
        assert self._connection.sock is not None
        self._socket = self._connection.sock
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(GUARD)
        assert not self._thread.is_alive()

    def _listen(self) -> None:
        answer = self._connection.getresponse()
        assert answer.status == 200 and "event-stream" in answer.headers["content-type"]
        for line in answer:
            if line.startswith(b"data: "):
                self.text += line.decode()
                event = json.loads(line[6:])
                self.seen.append(dict(event))
                for name, lines in self.gathered.items():
                    lines += event.pop(name, [])
                self.now |= event

    def until(self, condition: Callable[[], Any]) -> Any:
        return until(condition, lambda: self.text[-2000:])


@pytest.fixture
def wire() -> Iterator[Wire]:
    with serving(FakeEngine(delay=0.02)) as found:
        yield found


@pytest.mark.slow
def test_a_request_is_seen_while_it_runs_and_afterwards(wire: Wire) -> None:
    with Listener(wire.url) as listener:
        first = listener.until(lambda: listener.seen and listener.seen[0])
        assert first["first"] and first["model"] == "fake" and len(first["slots"]) == 4 and not first["running"]
        assert first["cells"] == {"used": 30, "total": 4096, "shared": 0}
        assert first["cache"]["hit_tokens"] == 1 and "tokens" in first["cache"]
        asking = threading.Thread(
            target=httpx.post,
            args=(f"{wire.url}/completion",),
            kwargs={"json": {"prompt": "a SECRET thing", "n_predict": 20}, "headers": {"X-Request-Id": "mine"}},
        )
        asking.start()
        (running,) = listener.until(lambda: [one for one in listener.now["running"] if one.get("predicted")])
        assert running["id"] == "mine" and running["path"] == "/completion" and running["client"] == "127.0.0.1"
        assert running["slots"] == [0] and running["prompt"] == 14 and 0 < running["first"] < 15
        busy = [slot for slot in listener.now["slots"] if slot["busy"]]
        assert [slot["prompt"] for slot in busy] == [14]
        asking.join()
        (ended,) = listener.until(lambda: listener.gathered["ended"])
        assert ended["status"] == 200 and ended["stop"] == "limit" and ended["model"] == "fake"
        assert (ended["prompt"], ended["predicted"]) == (14, 20) and ended["seconds"] >= ended["first"]
        assert ended["started"] == pytest.approx(
            ended["first"] - 0.002, abs=1e-4
        )  # prompts of the fake engine take 2 ms
        listener.until(lambda: not listener.now["running"])
    assert "SECRET" not in listener.text and "well" not in listener.text
    with Listener(wire.url) as late:
        assert late.until(lambda: late.gathered["ended"])[0]["id"] == "mine"


@pytest.mark.slow
def test_how_requests_end(wire: Wire) -> None:
    httpx.get(f"{wire.url}/props")  # GET requests are not in the list
    assert httpx.post(f"{wire.url}/completion", json={"prompt": "a", "n_predict": "x"}).status_code == 400
    assert httpx.post(f"{wire.url}/nowhere").status_code == 404
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{wire.url}/completion", json={"prompt": "a"}, timeout=0.2)
    requests = wire.state.live.requests
    until(lambda: requests.n_ended == 3)
    refused, unknown, left = requests.ended()
    assert (refused["status"], refused["stop"]) == (400, "") and "n_predict" in refused["reason"]
    assert unknown["status"] == 404 and unknown["path"] == "/nowhere"
    assert left["stop"] == "cancelled" and left["prompt"] == 1
    assert requests.n_errors == 2 and not requests.running(())
    counts = {"ended": 3, "errors": 2, "cancelled": 1}
    # The engine cancels the request after its response has ended.
    until(lambda: httpx.get(f"{wire.url}/live/requests").json() == counts | {"running": 0, "waiting": 0})
    with Listener(wire.url) as listener:
        listener.until(lambda: listener.now.get("counts") == counts)


def test_texts_of_the_prompt_cache_are_shown_only_with_slots() -> None:
    for slots in (True, False):
        with serving(slots=slots) as wire:
            served = wire.state.served
            assert served is not None
            tokens = tuple(served.tokenizer.encode("Once upon"))
            kept = StoredPrompt(70, 5000, 12.5, tokens)
            now = served.snapshot()._replace(stored=(kept,))
            served.engine.snapshot = lambda now=now: now  # type: ignore[method-assign]
            (entry,) = httpx.get(f"{wire.url}/live/cache").json()["entries"]
            assert entry == {"tokens": 70, "bytes": 5000, "used": 12.5} | ({"text": "Once upon"} if slots else {})


def test_a_key_is_needed() -> None:
    with serving(access=AccessRules(api_keys=(b"right",))) as wire:
        assert httpx.get(f"{wire.url}/live/events").status_code == 401
        with Listener(wire.url, {"Authorization": "Bearer right"}) as listener:
            listener.until(lambda: listener.now)


@pytest.mark.parametrize("path", ["/live/events", "/cluster/events"])
def test_streams_end_with_the_server(wire: Wire, path: str) -> None:
    """They end with their last chunk, without a reset, and do not delay the shutdown."""
    with wire.connect() as sock:
        sock.settimeout(GUARD)
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        text = sock.recv(1 << 16)
        while b"data: " not in text:
            text += sock.recv(1 << 16)
        wire.server.should_exit = True
        while not text.endswith(b"\r\n0\r\n\r\n"):
            part = sock.recv(1 << 16)
            assert part, text[-200:]
            text += part


@pytest.mark.parametrize("path", ["/live/events", "/cluster/events"])
def test_a_head_request_ends(wire: Wire, path: str) -> None:
    assert httpx.head(f"{wire.url}{path}", timeout=GUARD).status_code == 200


def test_the_live_view_does_not_wake_the_model(wire: Wire) -> None:
    state = wire.state
    assert state.served is not None
    sleep = state.sleep = Sleep(state, lambda: pytest.fail("the model was loaded"), 100)
    sleep.asleep = True
    state.served.engine.close()  # type: ignore[attr-defined]
    state.served = state.served.__class__(**{**vars(state.served), "engine": SleepingEngine(state.served.snapshot())})
    with Listener(wire.url) as listener:
        assert listener.until(lambda: listener.now)["asleep"] is True
    assert sleep.asleep


def test_log_lines_have_the_ids_of_their_requests(wire: Wire) -> None:
    logger = logging.getLogger("llamado")
    level, tail = logger.level, wire.state.live.log
    logger.addHandler(tail)
    logger.setLevel(logging.INFO)
    try:
        with Listener(wire.url) as listener:
            listener.until(lambda: listener.now)
            httpx.post(f"{wire.url}/tokenize", json={"content": "a"}, headers={"X-Request-Id": "known"})
            logging.getLogger("llamado.server").warning("look out")
            found = listener.until(lambda: len(listener.gathered["log"]) >= 2 and listener.gathered["log"])
            by_level = {line["level"]: line for line in found}
            assert by_level["info"]["request"] == "known" and "POST /tokenize 200" in by_level["info"]["text"]
            assert by_level["warning"]["text"] == "look out" and "request" not in by_level["warning"]
    finally:
        logger.removeHandler(tail)
        logger.setLevel(level)


def test_lines_since_the_last_read() -> None:
    tail = LogTail()

    def log(text: str, **more: Any) -> None:
        record = logging.LogRecord("llamado", logging.INFO, "", 0, text, (), None)
        record.__dict__.update(more)
        tail.emit(record)

    log("one")
    log("two", model="m.1")
    n, lines = tail.since(0)
    assert (n, [line.data for line in lines], lines[1].model) == (2, [b"one\n", b"two\n"], "m.1")
    token = current.set(Record("id", "GET", "/"))
    log("three")
    current.reset(token)
    n, lines = tail.since(n)
    assert (n, [line.data for line in lines], lines[0].request) == (3, [b"three\n"], "id")
    assert tail.since(n) == (3, [])
    for i in range(5000):
        log(f"{i} " + "x" * 200)
    n, lines = tail.since(0)
    assert n == 5003 and sum(len(line.data) for line in lines) <= 256 * 1024 and lines[-1].data.startswith(b"4999 ")
    assert tail.history("m.1") == b""


def snapshot(prompt: int, answer: int, waits: tuple[int, float], n_decode: int = 9, **more: int) -> EngineSnapshot:
    histogram = Histogram((1.0,), (waits[0], 0), waits[1])
    counters = Counters(
        prompt_tokens_total=prompt,
        tokens_predicted_total=answer,
        first_token_seconds=histogram,
        n_decode_total=n_decode,
    )
    now = EngineSnapshot((), counters, 2, 3, 40, 100)
    return now._replace(**more)


def test_samples_are_rates_since_the_last_one() -> None:
    samples = Samples(3)
    samples.take(100.0, snapshot(50, 60, (1, 5.0)), 7)
    assert samples.since(0) == {name: [] for name in samples.since(0)}  # the first call has no reference
    samples.take(102.0, snapshot(250, 61, (3, 6.0)), 8)
    found = samples.since(0)
    assert found == {
        "at": [102.0],
        "prompt": [100.0],
        "answer": [0.5],
        "running": [2.0],
        "waiting": [3.0],
        "cells": [40.0],
        "first_token": [0.5],
        "errors": [1.0],
    }
    samples.take(103.0, snapshot(10, 4, (0, 0.0), n_decode=1), 8)  # the model was reloaded: counters restart at 0
    found = samples.since(1)
    assert (found["prompt"], found["answer"], found["first_token"], found["errors"]) == ([10.0], [4.0], [None], [0.0])
    for second in range(104, 110):
        samples.take(second, snapshot(10, 4, (0, 0.0)), 8)
    assert samples.n == 8 and samples.since(0)["at"] == [107.0, 108.0, 109.0] and samples.since(7)["at"] == [109.0]
    assert not math.isnan(sum(samples.since(0)["answer"]))  # type: ignore[arg-type]


def test_the_last_hundred_requests_are_kept() -> None:
    requests = RecentRequests()
    for i in range(250):
        record = Record(f"r{i}", "POST", "/completion")
        number = requests.begin(record)
        record.status = 200
        requests.end(number, record, "m", cancelled=False)
    assert [one["id"] for one in requests.ended()] == [f"r{i}" for i in range(150, 250)]
    assert [one["id"] for one in requests.ended(248)] == ["r248", "r249"] and requests.ended(250) == []


def test_samples_are_taken_until_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.server.live.live._SAMPLE_SECONDS", 0.0)
    live = LiveHistory()

    async def work() -> None:
        import asyncio

        watching = asyncio.ensure_future(live.watch(lambda: snapshot(1, 1, (0, 0.0))))
        while live.samples.n < 3:
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.wait([watching])

    run(work())
    assert live.samples.n >= 3
