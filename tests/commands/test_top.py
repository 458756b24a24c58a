"""`llamado top`: what is shown of a server's machines."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from rich.console import Console

from llamado.commands import cli, top

DEVICE = {
    "device": "RPC0[10.0.0.2:50052]", "endpoint": "10.0.0.2:50052", "state": "ready", "why": None, "layers": [0, 1],
    "head": False, "holds": "layers 0 to 1",
    "memory": {"weights": 3_000_000, "kv": 400_000, "compute": 100_000, "free": 8_000_000_000, "total": 9_000_000_000},
    "speed": {"decode": 12.5e9, "prefill": 100e9}, "link": {"round_trip": 0.002, "bandwidth": 125e6, "pulse": 0.00025},
    "token_seconds": {"compute": 0.011, "link": 0.0012, "waiting": 0.0003},
}  # fmt: skip
HERE = {
    **DEVICE, "device": "CPU", "endpoint": None, "state": "idle", "holds": None, "why": "it is [slow]",
    "link": {"round_trip": None, "bandwidth": None, "pulse": None}, "speed": {"decode": None, "prefill": None},
}  # fmt: skip
BODY = {
    "model": "smol", "devices": [HERE, DEVICE], "tokens_per_second": 41.26,
    "token_seconds": {"total": 0.024, "compute": 0.02, "link": 0.003, "waiting": 0.001},
    "events": [{"at": 1000.0, "kind": "joined", "device": "RPC0[10.0.0.2:50052]", "what": "it has layers 0 to 1"}],
}  # fmt: skip


def shown(body: dict[str, Any], now: float = 1125.0) -> list[str]:
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(top.screen(body, now))
    return console.export_text().splitlines()


def test_what_comes_from_a_workers_own_disk() -> None:
    """All of its weights, some, none."""
    assert [top._own_disk({"weights": 4_000_000, "own_disk": own}) for own in (4_000_000, 1_000_000, 0)] == [
        ", from its own disk", ", 1.0 MB from its own disk", ""
    ]  # fmt: skip


def test_what_is_on_the_screen() -> None:
    title, _, here, far, *rest = shown(BODY)
    assert "smol" in title and "41.3 tokens/s" in title
    assert "a token: 24.00 ms (compute 20.00 ms, link 3.00 ms, waiting 1.00 ms)" in title
    assert here.split()[:2] == ["CPU", "idle"] and "it is [slow]" in here
    for text in (
        "RPC0[10.0.0.2:50052]", "ready", "layers 0 to 1", "3.5 MB", "8.0 GB", "12.5 GB/s", "0.25 ms", "125.0 MB/s",
        "11.00 ms", "1.20 ms", "0.30 ms",
    ):  # fmt: skip
        assert text in far, text
    assert any("2:05 ago" in line and "joined" in line for line in rest)


def test_who_passes_what_it_computes_to_whom() -> None:
    assert not any("straight" in line for line in shown(BODY))
    ring = {**BODY, "devices": [HERE, {**DEVICE, "passes_to": ["RPC1[h:2]"]}]}
    assert "straight from worker to worker: RPC0[10.0.0.2:50052] → RPC1[h:2]" in shown(ring)


def test_a_model_that_is_not_divided() -> None:
    lines = shown({"model": "smol", "devices": [], "tokens_per_second": None, "token_seconds": None, "events": []})
    assert "not divided" in lines[1]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Any], list[httpx.Request]]:
    def answer(status: int, body: Any) -> list[httpx.Request]:
        asked: list[httpx.Request] = []

        def handle(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return httpx.Response(status, content=body if isinstance(body, bytes) else json.dumps(body).encode())

        real = httpx.Client
        monkeypatch.setattr(
            "llamado.commands.top.httpx.Client", lambda **given: real(transport=httpx.MockTransport(handle), **given)
        )
        return asked

    return answer


def test_once_and_as_json(answering: Any, capsys: pytest.CaptureFixture[str]) -> None:
    asked = answering(200, BODY)
    assert cli.main(["top", "h:1", "--json", "--api-key", "k"]) == 0
    assert json.loads(capsys.readouterr().out) == BODY
    assert str(asked[0].url) == "http://h:1/cluster" and asked[0].headers["authorization"] == "Bearer k"
    assert cli.main(["top", "https://h/prefix/", "--once"]) == 0
    row, _ = [line for line in capsys.readouterr().out.splitlines() if "RPC0" in line]
    assert BODY["devices"][1]["holds"] in row, "a pipe has no narrow terminal: a device is one line"
    assert str(asked[1].url) == "https://h/prefix/cluster"


@pytest.mark.parametrize(("status", "body", "said"), [
    (503, {"error": {"message": "Loading model"}, "stage": "waiting: h:2"}, "503: Loading model (waiting"),
    (404, {"error": {"message": "Not Found"}}, "answers 404"), (200, b"<html>", "no JSON"), (200, [], "answers 200"),
])  # fmt: skip
def test_what_is_no_cluster(
    answering: Any, capsys: pytest.CaptureFixture[str], status: int, body: Any, said: str
) -> None:
    answering(status, body)
    assert cli.main(["top", "h:1", "--once"]) == 1
    assert said in capsys.readouterr().err
