"""Tokens written without waking the response's task: the same bytes and the same ends as with it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fakes import FakeEngine
from waiting import until
from wire import serving

from llamado.engine.request import Event
from llamado.server.generate import streaming
from llamado.server.generate.formats import NativeFormat
from llamado.server.generate.streaming import EventStream

WORDS = "Good words, one at a time, and no two of them alike: größer, 猫, end."
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
BODIES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "a", "stream": True},
    "/v1/completions": {"prompt": "a", "stream": True},
    "/v1/chat/completions": CHAT,
}


def stream(url: str, path: str) -> str:
    """Return an answer's events without ids and times."""
    text = httpx.post(url + path, json=BODIES[path], timeout=60).text
    return re.sub(r'"(id|created|\w+_ms|\w+_per_second)":("[^"]*"|[\d.e-]+)', r'"\1":0', text)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each step's tokens: True if they were written at once."""
    found: list[bool] = []
    offer = EventStream._write_at_once

    def offered(self: EventStream, events: Sequence[tuple[int, Event]]) -> bool:
        found.append(offer(self, events))
        return found[-1]

    monkeypatch.setattr(EventStream, "_write_at_once", offered)
    return found


@pytest.mark.parametrize("path", BODIES)
def test_the_bytes_are_the_same(path: str, written: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeEngine(WORDS, delay=0.002)) as wire:
        at_once = stream(wire.url, path)
        assert sum(written) > 10
        written.clear()
        monkeypatch.setattr(streaming, "WRITE", "no such extension")
        assert stream(wire.url, path) == at_once
        assert not any(written)
    assert at_once.count("data: ") > len(WORDS)


def test_an_error_while_writing_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection closes and the request is canceled, as for an error in the response's own task."""
    write, n = NativeFormat.token, 0

    def fails(self: NativeFormat, index: int, event: Any) -> bytes:
        nonlocal n
        n += 1
        if n == 20:
            raise RuntimeError("no more")
        return write(self, index, event)

    monkeypatch.setattr(NativeFormat, "token", fails)
    engine = FakeEngine(WORDS, delay=0.002)
    with serving(engine) as wire:
        with pytest.raises(httpx.RemoteProtocolError), httpx.stream("POST", wire.url + "/completion", json=BODIES["/completion"]) as answer:  # fmt: skip # noqa: E501
            assert 0 < len("".join(answer.iter_text()).split("data: ")) <= 20
        assert engine.cancelled


def test_concurrent_answers(written: list[bool]) -> None:
    """Each client gets its own complete answer."""
    with serving(FakeEngine(WORDS, delay=0.0005)) as wire:
        found: list[str] = []

        def ask() -> None:
            text = httpx.post(wire.url + "/completion", json=BODIES["/completion"], timeout=60).text
            events = [json.loads(part[6:]) for part in text.strip().split("\n\n")]
            found.append("".join(event["content"] for event in events))
            assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == [WORDS] * 6 and any(written)


@pytest.mark.slow
def test_tokens_for_a_full_connection_wait(written: list[bool]) -> None:
    """They are counted as unread, and sent when the connection accepts data again."""
    with serving(FakeEngine(WORDS, delay=0.005)) as wire:
        found: list[str] = []
        asking = threading.Thread(target=lambda: found.append(stream(wire.url, "/completion")))
        asking.start()
        until(lambda: sum(written) > 5)
        [connection] = wire.server.server_state.connections
        flow, loop = connection.flow, connection.loop  # type: ignore[union-attr]
        loop.call_soon_threadsafe(flow.pause_writing)
        until(lambda: flow.write_paused)
        sent = sum(written)
        time.sleep(0.1)
        assert sum(written) <= sent + 1 and not found
        loop.call_soon_threadsafe(flow.resume_writing)
        asking.join(60)
        assert found == [stream(wire.url, "/completion")]
