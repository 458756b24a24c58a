"""The bench over slow links: a stand-in for the engine, real taps before a stand-in for a worker."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import GUARD

from llamado.commands import cli
from llamado.commands.bench import latency
from llamado.commands.bench.latency import LatencyError, Measured, Taps, generation_rate, latencies_of, line, nodes_of
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.request import Done, Event, Failed, Request, Token
from llamado.flags import FlagError
from llamado.installation import install_command
from llamado.rpc import wire
from llamado.rpc.endpoint import Endpoint
from llamado.rpc.wire import RequestReader


class FakeEngine:
    """Answers each request with as many tokens as it asks for; the third request fails if told so."""

    def __init__(self, *, fails: bool = False) -> None:
        self.requests: list[Request] = []
        self.fails = fails
        self._todo: queue.SimpleQueue[tuple[Request, Callable[[Event], None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, request: Request, emit: Callable[[Event], None]) -> int:
        self.requests.append(request)
        self._todo.put((request, emit))
        return len(self.requests)

    def _work(self) -> None:
        while True:
            task = self._todo.get()
            assert task is not None
            request, emit = task
            for i in range(request.n_predict):
                time.sleep(0.0005)
                emit(Token("x", [1], None, i))
            emit(Failed(LatencyError("lost")) if self.fails else Done(None))  # type: ignore[arg-type]


class FakeLlama:
    def __init__(self, nodes: int, engine: FakeEngine | None = None) -> None:
        self.forward = SimpleNamespace(n_vocab=100, devices=[None] * nodes)
        self.engine = engine or FakeEngine()
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeLlama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_all_streams_count() -> None:
    llama: Any = FakeLlama(1)
    rate = generation_rate(llama, 3, 20)
    assert len(llama.engine.requests) == 3
    assert all(request.n_predict == 20 and not request.cache_prompt for request in llama.engine.requests)
    assert all(request.sampling.ignore_eos and request.sampling.temperature == 0 for request in llama.engine.requests)
    assert len({tuple(request.prompt) for request in llama.engine.requests}) == 3
    # A token takes half a millisecond or more.
    assert 0 < rate <= 2000


def test_the_rate_is_of_the_tokens_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two streams of 7 tokens, some of them told two at a time: what the first of them took is not known."""
    seconds = iter([100.0, 100.5, 101.0, 101.5, 102.0, 102.5, 103.0, 103.25])
    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))

    class Engine:
        def submit(self, request: Request, emit: Callable[[Event], None]) -> None:
            for tokens in ([1], [2, 3], [4, 5], [6, 7]):
                emit(Token("x", tokens, None, 0))
            emit(Done(None))  # type: ignore[arg-type]

    llama: Any = FakeLlama(1, Engine())  # type: ignore[arg-type]
    assert generation_rate(llama, 2, 7) == 13 / 3.25


def test_a_failure_is_passed_on() -> None:
    llama: Any = FakeLlama(1, FakeEngine(fails=True))
    with pytest.raises(LatencyError, match="lost"):
        generation_rate(llama, 2, 3)


def test_numbers_of_the_flags() -> None:
    assert latencies_of("0,5, 7.5") == [0.0, 5.0, 7.5]
    assert nodes_of("3,5", None) == [3, 5] and nodes_of("3", 2) == [3]
    for bad in ("", "x", "-1", "nan"):
        with pytest.raises(FlagError, match="--latency"):
            latencies_of(bad)
    for bad in ("", "1", "2.5"):
        with pytest.raises(FlagError, match="--nodes"):
            nodes_of(bad, None)
    with pytest.raises(FlagError, match="4 nodes need 3 workers, --rpc names 2"):
        nodes_of("3,4", 2)


def test_a_row_of_the_table() -> None:
    first = Measured(3, 0.0, 60.0, 200.0)
    row = line(Measured(4, 20.0, 30.0, 150.0), first)
    assert row == "| 4 | 20ms | off | 30.0 | 0.50× | 150.0 | 0.75× |"
    assert line(replace(first, ring=True), first).startswith("| 3 | 0ms | on |")
    assert line(first, first).count("1.00×") == 2
    assert {text.count("|") for text in (row, *latency.HEADER.splitlines())} == {8}


@pytest.mark.slow
def test_a_drawing_of_both_kinds(tmp_path: Path) -> None:
    rows = [Measured(nodes, ms, 60 / (1 + ms) / nodes, 200 / nodes) for nodes in (3, 4) for ms in (0, 5, 10)]
    png, svg = latency.draw(rows, "a model", tmp_path / "new")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    assert "<svg" in text and text.rstrip().endswith("</svg>")


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LatencyError, match="--out"):
        latency.draw([Measured(3, 0, 1, 1)], "", tmp_path / "file" / "folder")


def test_the_port_of_a_worker_is_read_from_its_log() -> None:
    says = "import sys; print('hello'); print('listening on 127.0.0.1:4242', file=sys.stderr); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", says],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert latency.listening_port(process) == 4242
        finally:
            process.kill()
            process.wait()


def test_a_worker_that_does_not_start() -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", "raise SystemExit('no such device')"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
        pytest.raises(LatencyError, match="no such device"),
    ):
        latency.listening_port(process)


class CountingWorker:
    """Answers HELLO and DEVICE_COUNT, of any connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(one,), daemon=True).start()

    def _serve(self, one: socket.socket) -> None:
        reader = RequestReader()
        with one:
            while data := one.recv(4096):
                reader.feed(data)
                while (request := reader.next()) is not None:
                    command = wire.COMMANDS[type(request)]
                    if wire.has_response(command):
                        response = wire.HelloResponse(7, 0, 0) if isinstance(request, wire.Hello) else wire.Number(2)
                        one.sendall(wire.write_response(command, response))


@pytest.mark.slow
def test_taps_change_their_delay() -> None:
    with closing(CountingWorker()) as a, closing(CountingWorker()) as b:
        with closing(Taps([a.endpoint, b.endpoint])) as taps:
            assert len(taps.endpoints) == 2
            for text in taps.endpoints:
                with socket.create_connection(Endpoint.parse(text).address, timeout=GUARD) as client:
                    client.sendall(wire.write_request(wire.Hello()))
                    assert len(client.recv(100)) == 36
                    for delay in (60.0, 0.0):
                        taps.delay(delay)
                        began = time.perf_counter()
                        client.sendall(wire.write_request(wire.GraphRecompute(0)))
                        client.sendall(wire.write_request(wire.DeviceCount()))
                        assert len(client.recv(100)) == 12
                        assert time.perf_counter() - began >= 1e-3 * delay
        assert taps._process.poll() == 0


# --- the whole command ------------------------------------------------------------------------------------------------


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No model is loaded and no process started; gives the options each load was asked for."""
    asked: list[Any] = []
    delays: list[float] = []

    class FakeTaps:
        def __init__(self, targets: list[Endpoint], *, both_ways: bool) -> None:
            self.endpoints = [f"127.0.0.1:{10_000 + target.port}" for target in targets]

        def delay(self, latency_ms: float) -> None:
            delays.append(latency_ms)

        def close(self) -> None:
            asked.append("closed")

    def load(_: object, options: Any, *__: object) -> FakeLlama:
        asked.append(options)
        return FakeLlama(1 + len(options.split.rpc))

    @contextmanager
    def workers(n: int) -> Iterator[list[Endpoint]]:
        yield [Endpoint("127.0.0.1", 50_000 + i) for i in range(n)]

    monkeypatch.setattr(latency, "Taps", FakeTaps)
    monkeypatch.setattr(LoadedModel, "load", load)
    monkeypatch.setattr(latency, "own_workers", workers)
    return asked


@pytest.mark.slow
def test_the_table(faked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["bench", "-m", "smollm2", "--latency", "0,5", "--nodes", "2,3", "-n", "4", "-r", "1", "--out", str(out)]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("| Nodes | Latency | Ring | tok/s | vs baseline |")
    assert [row.split("|")[1:3] for row in printed[2:]] == [
        [f" {nodes} ", f" {ms}ms "] for nodes in (2, 3) for ms in (0, 5)
    ]
    assert "1.00×" in printed[2]
    assert (out / "latency.png").exists() and (out / "latency.svg").exists()
    (first, closed, second, _) = faked
    assert closed == "closed"
    assert first.split.rpc == ("127.0.0.1:60000",) and second.split.rpc == ("127.0.0.1:60000", "127.0.0.1:60001")
    assert first.split.tensor_split == (1.0, 1.0) and second.split.tensor_split == (1.0, 1.0, 1.0)
    assert first.n_slots == 8


@pytest.mark.slow
def test_given_workers_and_a_given_split(faked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "-m", "smollm2", "--rpc", "127.0.0.1:1,127.0.0.1:2", "-ts", "2,1,1", "--latency", "10"]
    assert cli.main([*command, "-n", "4", "-r", "1", "-o", "json", "--out", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["model"], row["nodes"], row["latency_ms"]) == ("smollm2", 3, 10.0)
    assert row["single"] > 0 and row["streams"] > 0
    assert faked[0].split.rpc == ("127.0.0.1:10001", "127.0.0.1:10002")
    assert faked[0].split.tensor_split == (2.0, 1.0, 1.0)


def test_tls_cannot_be_delayed(faked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-m", "smollm2", "--rpc", "tls://127.0.0.1:1", "--latency", "10"]) == 2
    assert "TLS" in capsys.readouterr().err and not faked


def test_without_matplotlib(
    faked: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command = ["bench", "-m", "smollm2", "--latency", "0", "--nodes", "2", "-n", "4", "-r", "1"]
    assert cli.main([*command, "--out", str(tmp_path)]) == 1
    hint = f'drawing needs matplotlib, the extra "plot": {install_command("plot")}'
    assert capsys.readouterr().err == f"llamado: --out {tmp_path}: {hint}\n" and not faked
    monkeypatch.chdir(tmp_path)
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    assert printed.err == hint + "\n" and "| 2 | 0ms |" in printed.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_fewer_devices_than_asked_for(faked: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llama = FakeLlama(1)
    monkeypatch.setattr(LoadedModel, "load", lambda *_: llama)
    command = ["bench", "-m", "smollm2", "--latency", "0", "--nodes", "2", "--out", str(tmp_path)]
    assert cli.main(command) == 1
    assert llama.closed


def test_settings_of_the_split_are_kept() -> None:
    from llamado.devices.split.placement import SplitOptions

    given = SplitOptions(rpc=("a:1",), n_gpu_layers=3)
    split = latency.split_for(given, ["b:2"], even=False)
    assert split == replace(given, rpc=("b:2",))


@pytest.mark.slow
def test_workers_of_our_own() -> None:
    with latency.own_workers(2) as endpoints:
        assert len({endpoint.port for endpoint in endpoints}) == 2
        for endpoint in endpoints:
            with socket.create_connection(endpoint.address, timeout=GUARD) as client:
                client.sendall(wire.write_request(wire.Hello()))
                reader = wire.ResponseReader()
                reader.expect(wire.Command.HELLO)
                reader.feed(client.recv(36, socket.MSG_WAITALL))
                message = reader.next()
                assert message is not None and message[1].ours  # type: ignore[union-attr]
    for endpoint in endpoints:
        with pytest.raises(OSError):
            socket.create_connection(endpoint.address, timeout=GUARD)
