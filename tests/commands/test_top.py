"""`llamado top`: screens for the machines of a server and the replicas of a gateway."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from odd_json import FEW, HTML, TOO_DEEP, bent
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from rich.text import Text
from terminals import Terminal
from waiting import GUARD

from llamado.commands import cli
from llamado.commands.top import gateway, screen, top
from llamado.commands.top.table import FittingTable
from llamado.commands.top.view import View

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
    console.print(screen.screen(body, now))
    return console.export_text().splitlines()


def test_weights_from_the_disk_of_a_worker() -> None:
    """All of its weights, some, none."""
    assert [screen._own_disk({"weights": 4_000_000, "own_disk": own}) for own in (4_000_000, 1_000_000, 0)] == [
        ", from its own disk", ", 1.0 MB from its own disk", ""
    ]  # fmt: skip


def test_memory_and_utilization_of_a_card() -> None:
    """The free memory is the present one; the column "busy" is there only with a card."""
    card = {**HERE, "device": "CUDA0", "state": "ready", "utilization": 0.37}
    card["memory"] = {**card["memory"], "free_now": 2_500_000_000}  # type: ignore[dict-item]
    head, here, there = next(
        lines[i : i + 3] for lines in [shown({**BODY, "devices": [HERE, card]})] for i in range(len(lines))
        if lines[i].startswith("device")
    )  # fmt: skip
    assert "busy" in head and "37%" in there and "2.5 GB" in there and "8.0 GB" in here and "%" not in here
    assert not any("busy" in line for line in shown(BODY))


def test_no_token_time_before_the_first_token() -> None:
    seconds = {"total": 0.0, "compute": 0.5, "link": 0.02, "waiting": 0.8}
    title = shown({**BODY, "tokens_per_second": 0.0, "token_seconds": seconds})[0]
    assert "no token yet" in title and "compute" not in title and "0.00" not in title


def test_request_counts() -> None:
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(screen.screen(BODY, 1.0, (), {"running": 1, "waiting": 2, "ended": 30, "errors": 4, "cancelled": 5}))
    assert "requests: 1 running, 2 waiting, 30 ended, 4 errors, 5 cancelled" in console.export_text()


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


def test_narrow_terminal_keeps_addresses() -> None:
    """The column `layers` is wrapped, and other columns are omitted."""
    long = {**DEVICE, "holds": "layers 0 to 10, 18.2 MB from its own disk"}
    for width, there in ((160, ["reads", "link", "memory"]), (110, ["memory"]), (80, [])):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(screen.screen({**BODY, "devices": [HERE, long]}, 1125.0, sort="free"))
        lines = console.export_text().splitlines()
        (heading,) = [line for line in lines if line.startswith("device")]
        (row,) = [line for line in lines if line.startswith("RPC0")]
        assert row.split()[:5] == ["RPC0[10.0.0.2:50052]", "ready", "layers", "0", "to"] and "…" not in row, width
        assert "free▼" in heading and all(name in heading for name in there), width  # the sort column stays
        assert ("reads" in heading) == (width == 160)


def test_worker_ring() -> None:
    assert not any("ring" in line for line in shown(BODY))
    ring = {**BODY, "devices": [HERE, {**DEVICE, "passes_to": ["RPC1[h:2]"]}]}
    assert "worker ring: RPC0[10.0.0.2:50052] → RPC1[h:2]" in shown(ring)


def test_model_that_is_not_split() -> None:
    lines = shown({"model": "smol", "devices": [], "tokens_per_second": None, "token_seconds": None, "events": []})
    assert "not split" in lines[1]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Any], list[httpx.Request]]:
    def answer(status: int, body: Any) -> list[httpx.Request]:
        asked: list[httpx.Request] = []

        def handle(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return httpx.Response(status, content=body if isinstance(body, bytes) else json.dumps(body).encode())

        real = httpx.Client
        monkeypatch.setattr(
            "llamado.commands.top.top.httpx.Client",
            lambda **given: real(transport=httpx.MockTransport(handle), **given),
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
    (404, {"error": {"message": "Not Found"}}, "neither a server of one model"),
    (401, {"error": {"message": "Invalid API Key"}}, "401: Invalid API Key (--api-key KEY"),
    (200, b"<html>", "without JSON"), (200, [], "answers 200"),
])  # fmt: skip
def test_errors_of_cluster_responses(
    answering: Any, capsys: pytest.CaptureFixture[str], status: int, body: Any, said: str
) -> None:
    answering(status, body)
    assert cli.main(["top", "h:1", "--once"]) == 1
    assert said in capsys.readouterr().err


REPLICA = {
    "name": "a", "ready": True, "backup": False, "weight": 1, "state": "ready", "message": "ready", "since": 1.0,
    "circuit": "closed", "in_flight": 2, "others": 1, "slots": 4, "requests": 17, "requests_per_second": 1.5,
    "answers": {"200": 14, "503": 2}, "losses": {"lost": 1}, "models": ["smol"], "build": "b1",
}  # fmt: skip
AWAY = {
    **REPLICA, "name": "b", "ready": False, "state": "connecting", "message": "cannot connect: [refused]",
    "in_flight": 0, "others": 0, "slots": None, "requests": 40, "requests_per_second": 0.0, "circuit": "open",
    "losses": {}, "models": [],
}  # fmt: skip


def test_replicas_of_a_gateway(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Shown like a server's machines, by the same command; a router has neither."""
    bodies = {"/gateway/status": {"replicas": [REPLICA, AWAY]}}

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.url.path in bodies else 404, json=bodies.get(request.url.path, {}))

    transport, real = httpx.MockTransport(handle), httpx.Client
    monkeypatch.setattr("llamado.commands.top.top.httpx.Client", lambda **given: real(transport=transport, **given))
    assert cli.main(["top", "h:1", "--once"]) == 0
    title, _, a, b = capsys.readouterr().out.splitlines()
    assert " ".join(title.split()) == "gateway 1 of 2 replicas ready 2 requests running 1.50 requests/s"
    assert a.split() == ["a", "ready", "3", "of", "4", "17", "3", "1.50", "smol"]
    assert b.split() == [
        *["b", "connecting:", "cannot", "connect:", "[refused]", "(circuit", "open)", "0", "40", "2", "0.00"]
    ]
    assert cli.main(["top", "h:1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == bodies["/gateway/status"]
    bodies.clear()
    assert cli.main(["top", "h:1", "--once"]) == 1 and "neither a server of one model" in capsys.readouterr().err


def test_narrow_terminal_omits_columns() -> None:
    """No name and no number is truncated: replicas at 60 columns, slots at 40."""
    console = Console(width=60, record=True, file=io.StringIO())
    long = {**REPLICA, "name": "http://replica-0.example.internal:8080", "models": ["smollm2-135m", "gemma3"]}
    console.print(gateway.gateway_screen([long, AWAY], {"a": 12.0}, sort="requests/s"))
    text = console.export_text()
    heading = next(line for line in text.splitlines() if line.startswith("replica"))
    assert heading.split() == ["replica", "state", "busy", "requests/s▼"] and "…" not in text and "3 of 4" in text
    assert {"replica-0", "internal"} <= {*re.split(r"[/.:\s]+", text)}
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(screen.screen({**BODY, "devices": [], "events": []}, 0.0, SLOTS))
    lines = console.export_text().splitlines()
    assert "slot  state     prompt  generated" in [line.rstrip() for line in lines]
    assert "   1  decoding      33         21" in [line.rstrip() for line in lines]


def test_sort_replicas() -> None:
    for sort, reverse, first in (("replica", True, "b"), ("requests", False, "b"), ("busy", False, "a")):
        console = Console(width=220, record=True, file=io.StringIO())
        console.print(gateway.gateway_screen([REPLICA, AWAY], {"a": 12.0}, sort=sort, reverse=reverse))
        title, header, row, _ = console.export_text().splitlines()
        assert row.split()[0] == first and ("▲" if reverse else "▼") in header and "12.0 tokens/s" in title


def test_tokens_a_second_of_replicas() -> None:
    """Two models of one replica add up; a process that was started again begins anew."""
    rates = gateway.TokenRates()
    name = "llamacpp:tokens_predicted_total"

    def text(a: int, b: int) -> str:
        return f'{name}{{replica="a",model="x"}} {a}\n{name}{{replica="a",model="y"}} 5\n{name}{{replica="b"}} {b}\n'

    assert rates.update(text(10, 100), 1.0) == {}
    assert rates.update(text(30, 110), 3.0) == {"a": 10.0, "b": 5.0}
    assert rates.update(text(30, 4), 4.0) == {"a": 0.0}
    assert rates.update("no metrics {", 5.0) == {}


SLOTS = [
    {"id": 0, "n_ctx": 512, "is_processing": True, "n_prompt_tokens": 40, "n_prompt_tokens_processed": 12,
     "n_prompt_tokens_cache": 7, "next_token": [{"n_decoded": 0}]},
    {"id": 1, "n_ctx": 512, "is_processing": True, "n_prompt_tokens": 33, "n_prompt_tokens_processed": 3,
     "n_prompt_tokens_cache": 30, "next_token": [{"n_decoded": 21}]},
    {"id": 2, "n_ctx": 512, "is_processing": False},
]  # fmt: skip


def test_slots() -> None:
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(screen.screen({**BODY, "events": []}, 0.0, SLOTS))
    *_, first, second, third = console.export_text().splitlines()
    assert first.split() == ["0", "prompt", "12", "7", "0", "512"]
    assert second.split() == ["1", "decoding", "33", "30", "21", "512"]
    assert third.split() == ["2", "idle", "0", "0", "0", "512"]


def devices(sort: str, reverse: bool = False) -> list[str]:
    far = {**DEVICE, "device": "RPC1[h:2]", "layers": [2, 3], "token_seconds": {**DEVICE["token_seconds"], "link": 9.0}}
    console = Console(width=220, record=True, file=io.StringIO())
    body = {**BODY, "devices": [DEVICE, HERE, far], "events": []}
    console.print(screen.screen(body, 0.0, sort=sort, reverse=reverse))
    return [line.split("[")[0].split()[0] for line in console.export_text().splitlines()[2:]]


def test_sort_devices() -> None:
    assert devices("") == ["RPC0", "CPU", "RPC1"]
    assert devices("device") == ["CPU", "RPC0", "RPC1"] and devices("device", True) == ["RPC1", "RPC0", "CPU"]
    assert devices("on link") == ["RPC1", "RPC0", "CPU"], "in descending order"
    assert devices("reads")[-1] == "CPU", "unknown values are last"
    for column in screen.COLUMNS:
        assert sorted(devices(column.name)) == ["CPU", "RPC0", "RPC1"]


# --- the full screen --------------------------------------------------------------------------------------------------
class Server:
    """Stand-in that reports machines and counts requests of /cluster."""

    def __init__(self) -> None:
        self.asked, self.speed, self.status = 0, 41.26, 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body: Any = {**BODY, "tokens_per_second": outer.speed}
                if self.path == "/slots":
                    body = SLOTS
                elif self.path == "/live/requests":
                    body = {"cancelled": 5}
                else:
                    outer.asked += 1
                data = json.dumps(body).encode()
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def order_of(terminal: Terminal) -> list[str]:
    return re.findall(r"^(CPU|RPC0)", terminal.shown, re.MULTILINE)


@pytest.mark.full
def test_full_screen(server: Server) -> None:
    terminal = Terminal(["top", server.url, "--interval", "0.1"], rows=30, columns=170)
    try:
        terminal.until("41.3 tokens/s")
        terminal.until("q quit")
        assert order_of(terminal) == ["CPU", "RPC0"] and "slots" in terminal.shown
        server.speed = 52.0
        terminal.until("52.0 tokens/s")
        terminal.type("p")
        terminal.until("^paused")
        asked, server.speed = server.asked, 63.0
        terminal.read(0.5)
        assert server.asked <= asked + 1 and "63.0" not in terminal.shown
        terminal.type(" ")
        terminal.until("63.0 tokens/s")
        terminal.type("\x1b[D")  # left: last column
        terminal.until("waiting▼")
        terminal.type("\x1b[C\x1b[C")  # no sorting, then the first column
        terminal.until("device▼")
        terminal.type("r")
        terminal.until("device▲")
        assert order_of(terminal) == ["RPC0", "CPU"]
        terminal.resize(8, 170)
        terminal.until("q quit")
        terminal.read(0.3)
        assert "the last hour" not in terminal.shown and len(terminal.shown.splitlines()) <= 8
        terminal.type("\x1b[B" * 20)
        terminal.until("the last hour")
        assert "q quit" in terminal.shown.splitlines()[-1]
        terminal.resize(30, 60)
        terminal.until("q quit")
        server.status = 503
        terminal.until("answers 503")
        assert "63.0" in terminal.shown, "the last snapshot stays"
        server.status = 200
        terminal.read(0.5)
        assert "answers 503" not in terminal.shown
        terminal.type("q")
        assert terminal.exit_code() == 0
        assert b"\x1b[?1049l" in terminal.raw, "the earlier screen is restored"
    finally:
        terminal.close()


def test_hanging_server_does_not_block_the_terminal() -> None:
    """The view ends when the user quits, while a request still waits."""
    first = screen.Snapshot(0.0, ["device"], lambda sort, reverse: Text("machines"))
    requested, released, answered = threading.Event(), threading.Event(), threading.Event()

    def fetch() -> screen.Snapshot:
        requested.set()
        released.wait(GUARD)
        answered.set()
        return first

    with create_pipe_input() as pipe:

        def quit() -> None:
            requested.wait(GUARD)
            pipe.send_text("q")

        threading.Thread(target=quit, daemon=True).start()
        View(first, fetch, 0.001, input=pipe, output=DummyOutput()).run()
    assert requested.is_set() and not answered.is_set()
    released.set()


def test_pipe_gets_one_snapshot(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", server.url]) == 0
    out = capsys.readouterr().out
    assert "41.3 tokens/s" in out and "\x1b" not in out and server.asked == 1
    assert "requests: 5 cancelled" in out


SLOT = {
    "id": 0, "n_ctx": 4096, "is_processing": True, "n_prompt_tokens": 7, "n_prompt_tokens_processed": 3,
    "n_prompt_tokens_cache": 2, "next_token": [{"n_decoded": 5}],
}  # fmt: skip
COUNTS = {"running": 1, "waiting": 2, "ended": 30, "errors": 4, "cancelled": 5}


@pytest.mark.slow
def test_any_response_can_be_shown() -> None:
    body = {**BODY, "devices": [{**DEVICE, "passes_to": ["CPU"]}]}
    bodies = [*((one, [SLOT], COUNTS) for one in bent(body, FEW)), *((BODY, one, COUNTS) for one in bent([SLOT], FEW)),
              *((BODY, [SLOT], one) for one in bent(COUNTS, FEW))]  # fmt: skip
    console = Console(width=220, file=io.StringIO())
    for n, (cluster, slots, counts) in enumerate(bodies):
        column = screen.COLUMNS[n % len(screen.COLUMNS)].name
        shown = screen.screen(cluster, 1e9, slots, counts, sort=column)
        for part in shown.renderables:
            if isinstance(part, FittingTable):
                part.make(part.names, None)  # makes all cells; rendering takes long
            elif n % 4 == 0:  # printing takes long
                console.print(part)


@pytest.mark.parametrize("path", ["/cluster", "/slots", "/live/requests"])
@pytest.mark.parametrize("body", [HTML, TOO_DEEP, b"", b"\xff", b'"\\ud800"', b"[1]", b"1e999", b'{"error": "no"}'])
@pytest.mark.parametrize("status", [200, 401, 500])
def test_invalid_responses_raise_top_error(path: str, body: bytes, status: int) -> None:
    answers = {"/cluster": json.dumps(BODY).encode(), "/slots": b"[]", "/live/requests": b"{}", path: body}
    transport = httpx.MockTransport(
        lambda request: httpx.Response(status if request.url.path == path else 200, content=answers[request.url.path])
    )
    with httpx.Client(transport=transport) as http:
        look = partial(top.cluster, http, "http://h"), partial(top.slots, http, "http://h")
        for ask in (*look, partial(top.requests, http, "http://h")):
            with suppress(top.TopError):
                ask()
