"""Tokens that a gateway charges to a key: those counted by the server, independent of the client's request."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes import ANSWER, FakeEngine
from wire import serving

from llamado.gateway.limits import KeyUsage
from llamado.gateway.options import GatewayOptions, KeyOptions, ReplicaOptions
from llamado.gateway.serve import make_gateway
from llamado.http.monitoring import metrics
from llamado.http.monitoring.metrics import UsageReports
from llamado.http.sockets import listen

KEY = {"Authorization": "Bearer s"}
N_ANSWER = len(ANSWER.encode())


@contextlib.contextmanager
def metered(engine: FakeEngine) -> Iterator[tuple[httpx.Client, KeyUsage]]:
    """Yield a client of a gateway in front of a server, and the use of its key."""
    with serving(engine) as wire:
        key = KeyOptions(name="k", key="s", tokens_per_day=10**6)
        server = make_gateway(GatewayOptions(replicas=(ReplicaOptions(url=wire.url),), keys=(key,)))
        sockets = listen(("127.0.0.1",), 0)
        thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
        thread.start()
        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{sockets[0].getsockname()[1]}", headers=KEY, timeout=60
            ) as http:
                http.post("/tokenize", json={"content": ""})  # waits until the gateway has its replica
                assert server.gateway is not None
                yield http, server.gateway._limits.usages[0]
        finally:
            server.should_exit = server.force_exit = True
            thread.join(60)


MESSAGES = [{"role": "user", "content": "hi"}]
N_CHAT = len(b"<user>hi</><assistant>")


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[httpx.Client, KeyUsage]]:
    with metered(FakeEngine()) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/completion", {"prompt": "hello", "response_fields": ["content"]}, 5 + N_ANSWER),
        ("/completion", {"prompt": ["a", "bc", "def"], "n_predict": 2}, 6 + 3 * 2),
        ("/v1/completions", {"prompt": ["a", "bc"], "max_tokens": 1, "n": 3}, 3 + 6),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}, N_CHAT + 3),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}, N_CHAT + 3),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}, N_CHAT + 3),
        ("/completion", {"prompt": 7}, 0),
        ("/apply-template", {"messages": MESSAGES}, 0),
    ],
)
def test_tokens_are_charged_as_counted(
    gateway: tuple[httpx.Client, KeyUsage], path: str, body: dict[str, Any], tokens: int, stream: bool
) -> None:
    http, use = gateway
    before = use.tokens
    forged = {"X-Llamado-Usage-Id": "0" * 32, "X-Request-Id": "always-the-same"}
    http.post(path, json={**body, "stream": stream}, headers=forged)
    assert use.tokens - before == tokens


def test_a_disconnected_client_pays_for_generated_tokens() -> None:
    engine, reached, gone = FakeEngine(), threading.Event(), threading.Event()

    def pause(i: int) -> None:
        if i == 3:
            reached.set()
            assert gone.wait(60)

    with metered(engine) as (http, use):
        engine.before = pause
        with http.stream("POST", "/completion", json={"prompt": "hello", "stream": True}) as answer:
            next(answer.iter_text())
            assert reached.wait(60)
        wait_until(lambda: bool(engine.cancelled))
        gone.set()
        wait_until(lambda: use.tokens == 5 + 3)


def wait_until(condition: Any) -> None:
    """Wait for a condition that another thread sets."""
    tick = threading.Event()
    for _ in range(12_000):
        if condition():
            return
        tick.wait(0.005)
    raise AssertionError("it did not happen")


async def test_reports_are_limited_and_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MOST_KEPT", 2)
    monkeypatch.setattr(metrics, "_WAIT_SECONDS", 0.0)

    reports = UsageReports()
    for id in "abc":
        reports.begin(id)
        if id != "b":
            reports.end(id, 7)
    assert [await reports.take(id) for id in "abcc"] == [None, None, 7, None]
