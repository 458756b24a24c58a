"""`llamado bench --latency`, with a stand-in for the engine, and real taps in front of a stand-in for a worker."""

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
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parsers import parser_of
from waiting import GUARD

from llamado.commands import cli
from llamado.commands.bench import latency
from llamado.commands.bench.latency import (
    OPENINGS,
    PLAIN,
    LatencyError,
    Row,
    Taps,
    compared_of,
    generation_rate,
    latencies_of,
    nodes_of,
    predicted,
    table,
)
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.request import Done, Event, Failure, Request, Token
from llamado.flags import FlagError, parse
from llamado.installation import install_command
from llamado.rpc import wire
from llamado.rpc.endpoint import Endpoint
from llamado.rpc.wire import RequestReader


class FakeEngine:
    """Answers each request with `n_predict` tokens. `fails`: end it with a failure."""

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
            for i in range(request.params.n_predict):
                time.sleep(0.0005)
                emit(Token("x", [1], None, i))
            emit(Failure(LatencyError("lost")) if self.fails else Done(None))  # type: ignore[arg-type]


class FakeLlama:
    def __init__(self, nodes: int, engine: FakeEngine | None = None) -> None:
        self.forward = SimpleNamespace(n_vocab=100, devices=[None] * nodes)
        self.engine = engine or FakeEngine()
        self.closed = False

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        assert add_special
        return list(text.encode())

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeLlama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_rate_counts_all_streams() -> None:
    llama: Any = FakeLlama(1)
    rate = generation_rate(llama, 3, 20, seed=2)
    assert len(llama.engine.requests) == 3
    assert all(request.params.n_predict == 20 and not request.params.cache_prompt for request in llama.engine.requests)
    assert [bytes(request.prompt).decode() for request in llama.engine.requests] == list(OPENINGS[2:5])
    # A token takes at least half a millisecond.
    assert 0 < rate <= 2000


def test_sampling_and_unique_seeds() -> None:
    """Greedy text repeats itself, and drafts repeat earlier outputs."""
    llama: Any = FakeLlama(1)
    for seed in range(3):
        generation_rate(llama, 2, 2, seed)
    sampling = [request.params.sampling for request in llama.engine.requests]
    assert all(one.temperature > 0 and one.ignore_eos for one in sampling)
    assert len({one.seed for one in sampling}) == 6


def test_rate_excludes_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams of 7 tokens, some sent in pairs. The time of the first token is unknown."""
    seconds = iter([100.0, 100.5, 101.0, 101.5, 102.0, 102.5, 103.0, 103.25])
    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))

    class Engine:
        def submit(self, request: Request, emit: Callable[[Event], None]) -> None:
            for tokens in ([1], [2, 3], [4, 5], [6, 7]):
                emit(Token("x", tokens, None, 0))
            emit(Done(None))  # type: ignore[arg-type]

    llama: Any = FakeLlama(1, Engine())  # type: ignore[arg-type]
    assert generation_rate(llama, 2, 7, 0) == 13 / 3.25


def test_failure_is_raised() -> None:
    llama: Any = FakeLlama(1, FakeEngine(fails=True))
    with pytest.raises(LatencyError, match="lost"):
        generation_rate(llama, 2, 3, 0)


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


def compared(*words: str, environ: dict[str, str] | None = None) -> list[str]:
    return compared_of(parse(parser_of("bench"), "bench", ["-m", "x", *words], environ or {})[0])


def test_columns_of_the_flags() -> None:
    assert compared() == [] and compared("--compare", "predicted, ring") == ["ring", "predicted"]
    with pytest.raises(FlagError, match="--compare: expected some of ring, drafts, streams, predicted, got 'rings'"):
        compared("--compare", "ring,rings")
    for flags in (["--spec-type", "suffix"], ["--spec-default"], ["-md", "small"]):
        assert compared(*flags) == ["drafts"]
    assert compared("--spec-type", "none") == [] == compared(environ={"LLAMA_ARG_SPEC_TYPE": "none"})
    assert compared("--spec-draft-n-max", "4") == []


def test_a_row_of_the_table() -> None:
    """The format of a guide to split inference."""
    rows = [Row(3, 0.0, {PLAIN: 60.2}), Row(3, 30.0, {PLAIN: 9.4})]
    assert list(table(rows)) == [
        "| Nodes | Latency | tok/s | vs baseline |",
        "|-------|---------|------:|-------------|",
        "| 3     | 0ms     |  60.2 | 1.00×       |",
        "| 3     | 30ms    |   9.4 | 0.16×       |",
    ]


def test_baseline_of_all_columns_is_plain_decoding() -> None:
    head, rule, first, _ = table([Row(3, 0.0, {PLAIN: 50.0, "ring": 75.0, "streams": 200.0}), Row(3, 5.0, {
        PLAIN: 25.0, "ring": 30.0, "streams": 150.0})])  # fmt: skip
    assert (
        head == "| Nodes | Latency | tok/s | vs baseline | ring tok/s | vs baseline | 8 streams tok/s | vs baseline |"
    )
    assert len(rule) == len(head) == len(first)
    assert [cell.strip() for cell in first.split("|")[3:-1]] == ["50.0", "1.00×", "75.0", "1.50×", "200.0", "4.00×"]


def test_predicted_rates() -> None:
    rows = [Row(n, ms, {PLAIN: 1e3 / (20 + n)}) for n in (3, 5) for ms in (5.0, 25.0)]
    assert predicted(rows, rows[0], both_ways=False) == pytest.approx(1e3 / 23)
    assert predicted(rows, rows[1], both_ways=False) == pytest.approx(1e3 / (23 + 2 * 20))
    assert predicted(rows, rows[3], both_ways=False) == pytest.approx(1e3 / (25 + 4 * 20))
    assert predicted(rows, rows[3], both_ways=True) == pytest.approx(1e3 / (25 + 8 * 20))


ROWS = [Row(nodes, ms, {PLAIN: 60 / (1 + ms) / nodes, "ring": 200 / nodes}) for nodes in (3, 4) for ms in (0, 5, 10)]


def test_curves() -> None:
    """One plot for each column, one curve for each number of nodes. Nothing is painted."""
    plain, ring = latency._figure(ROWS, "a model").axes
    assert (plain.get_title(), ring.get_title()) == (PLAIN, "ring")
    assert [line.get_label() for line in plain.lines] == ["3 nodes", "4 nodes"]
    assert [*plain.lines[1].get_xdata()] == [0, 5, 10] and [*plain.lines[1].get_ydata()] == [15, 2.5, 60 / 11 / 4]
    assert [*ring.lines[0].get_ydata()] == [200 / 3] * 3


@pytest.mark.full
def test_plots(tmp_path: Path) -> None:
    png, svg = latency.draw(ROWS, "a model", tmp_path / "new")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    assert "<svg" in text and text.rstrip().endswith("</svg>")


@pytest.mark.slow
def test_plot_folder_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LatencyError, match="--out"):
        latency.draw([Row(3, 0, {PLAIN: 1})], "", tmp_path / "file" / "folder")


def test_worker_port_is_read_from_its_log() -> None:
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


def test_worker_fails_to_start() -> None:
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
    """Worker that answers HELLO and DEVICE_COUNT on all connections."""

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


# --- the command ------------------------------------------------------------------------------------------------------


COMPUTE_MS = 20.0


class Bench:
    """Records what the command loads and measures; a token takes compute + (N−1) × latency."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.measured: list[tuple[int, float, int, int, int]] = []
        """Nodes, latency, streams, tokens and seed."""
        self.latency_ms = -1.0
        self.taps_closed = False

    def load(self, _: object, options: Any, nodes: int) -> FakeLlama:
        self.loaded.append(options)
        return FakeLlama(nodes)

    def rate(self, llama: Any, n_streams: int, n_predict: int, seed: int) -> float:
        nodes = len(llama.forward.devices)
        self.measured.append((nodes, self.latency_ms, n_streams, n_predict, seed))
        return n_streams * 1e3 / (COMPUTE_MS + (nodes - 1) * self.latency_ms)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Replace models, workers and taps of the command by stand-ins."""
    bench = Bench()

    class FakeTaps:
        def __init__(self, targets: list[Endpoint], *, both_ways: bool) -> None:
            self.endpoints = [f"127.0.0.1:{10_000 + target.port}" for target in targets]

        def delay(self, latency_ms: float) -> None:
            bench.latency_ms = latency_ms

        def close(self) -> None:
            bench.taps_closed = True

    @contextmanager
    def workers(n: int) -> Iterator[list[Endpoint]]:
        yield [Endpoint("127.0.0.1", 50_000 + i) for i in range(n)]

    monkeypatch.setattr(latency, "Taps", FakeTaps)
    monkeypatch.setattr(latency, "_load", bench.load)
    monkeypatch.setattr(latency, "generation_rate", bench.rate)
    monkeypatch.setattr(latency, "own_workers", workers)
    return bench


def test_the_table(faked: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """The time per token grows by compute + (N−1) × latency. The table has four columns."""
    assert cli.main(["bench", "-m", "smollm2", "--latency", "0,5", "--nodes", "2,3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| Nodes | Latency | tok/s | vs baseline |",
        "|-------|---------|------:|-------------|",
        "| 2     | 0ms     |  50.0 | 1.00×       |",
        "| 2     | 5ms     |  40.0 | 0.80×       |",
        "| 3     | 0ms     |  50.0 | 1.00×       |",
        "| 3     | 5ms     |  33.3 | 0.67×       |",
    ]
    assert faked.taps_closed
    two, three = faked.loaded[:2]
    assert two.split.rpc == ("127.0.0.1:60000",) and three.split.rpc == ("127.0.0.1:60000", "127.0.0.1:60001")
    assert two.split.tensor_split == (1.0, 1.0) and three.split.tensor_split == (1.0, 1.0, 1.0)
    for options in faked.loaded:
        assert options.draft_kinds == () and not options.split.ring and options.n_slots == 1


def test_rounds_and_warm_up(faked: Bench) -> None:
    command = ["bench", "-m", "smollm2", "--latency", "0,5", "--nodes", "2,3", "-r", "2", "-n", "40"]
    assert cli.main([*command, "--compare", "ring,streams"]) == 0
    # For each number of nodes: plain decoding and streams, then the ring.
    assert [(len(options.split.rpc), options.split.ring) for options in faked.loaded] == 2 * [
        (1, False), (1, True), (2, False), (2, True),
    ]  # fmt: skip
    assert {options.n_slots for options in faked.loaded} == {8}
    warm_ups, timed = faked.measured[::2], faked.measured[1::2]
    assert {(cell[3], cell[:3]) for cell in warm_ups} == {(8, cell[:3]) for cell in timed}
    assert [cell[:3] for cell in timed[:6]] == [
        (2, 0.0, 1), (2, 0.0, 8), (2, 5.0, 1), (2, 5.0, 8),
        (2, 0.0, 1), (2, 5.0, 1),
    ]  # fmt: skip
    assert {cell[3] for cell in timed} == {40} and [cell[:4] for cell in timed[:12]] == [
        cell[:4] for cell in timed[12:]
    ]
    assert not {cell[4] for cell in timed} & {cell[4] for cell in warm_ups}
    assert all(first[4] != second[4] for first, second in pairwise(cell for cell in timed if cell[2] == 1))


def test_cell_is_the_median_of_rounds(
    faked: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = iter([1.0, 10.0, 1.0, 70.0, 1.0, 20.0])  # warm-up, round, …
    monkeypatch.setattr(latency, "generation_rate", lambda *_: next(rates))
    assert cli.main(["bench", "-m", "smollm2", "--latency", "0", "--nodes", "2", "-r", "3", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {"model": "smollm2", "nodes": 2, "latency_ms": 0.0, "tokens_per_second": {"plain": 20.0}}


def test_drafts_column(faked: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "-m", "smollm2", "--latency", "0,5", "--nodes", "2", "-r", "1", "-o", "json"]
    for flags, kinds in (
        (["--compare", "drafts,predicted"], ("suffix",)),
        (["--spec-type", "ngram-mod"], ("ngram-mod",)),
    ):
        faked.loaded.clear()
        assert cli.main([*command, *flags]) == 0
        assert [options.draft_kinds for options in faked.loaded] == [(), kinds]
        rows = json.loads(capsys.readouterr().out)
        expected = {"plain": 40.0, "drafts": 40.0} | ({"predicted": 40.0} if "--compare" in flags else {})
        assert rows[1]["tokens_per_second"] == pytest.approx(expected)
    assert cli.main([*command, "--compare", "drafts", "--spec-type", "none"]) == 2
    assert "--spec-type none disables drafts" in capsys.readouterr().err
    assert cli.main([*command, "--compare", "ring", "--rpc", "h:1", "--rpc-ring", "off"]) == 2
    assert "--rpc-ring off disables the ring" in capsys.readouterr().err


def test_given_workers_and_split(faked: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "-m", "smollm2", "--rpc", "127.0.0.1:1,127.0.0.1:2", "-ts", "2,1,1", "--latency", "10"]
    assert cli.main([*command, "-n", "4", "-r", "1", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["nodes"], row["latency_ms"]) == (3, 10.0) and row["tokens_per_second"] == {"plain": 25.0}
    assert faked.loaded[0].split.rpc == ("127.0.0.1:10001", "127.0.0.1:10002")
    assert faked.loaded[0].split.tensor_split == (2.0, 1.0, 1.0)


def test_tls_cannot_be_delayed(faked: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-m", "smollm2", "--rpc", "tls://127.0.0.1:1", "--latency", "10"]) == 2
    assert "TLS" in capsys.readouterr().err and not faked.loaded


def test_without_matplotlib(
    faked: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command = ["bench", "-m", "smollm2", "--latency", "0", "--nodes", "2", "-n", "4", "-r", "1"]
    assert cli.main([*command, "--out", str(tmp_path)]) == 1
    hint = f'drawing needs matplotlib, the extra "plot": {install_command("plot")}'
    assert capsys.readouterr().err == f"llamado: --out {tmp_path}: {hint}\n" and not faked.loaded
    monkeypatch.chdir(tmp_path)
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    assert printed.err == "round 1 of 1: 2 nodes\n" and "| 2     | 0ms     |" in printed.out
    assert list(tmp_path.iterdir()) == []


def test_fewer_devices_than_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = FakeLlama(1)
    monkeypatch.setattr(LoadedModel, "load", lambda *_: llama)
    with pytest.raises(LatencyError, match="loaded on 1 of 2 devices"):
        latency._load(None, None, 2)  # type: ignore[arg-type]
    assert llama.closed


def test_bench_warns_that_drafts_have_no_effect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llamado.commands.bench.speed.bench", lambda _: 0)
    assert cli.main(["bench", "-m", "smollm2", "--spec-type", "suffix", "--spec-draft-n-max", "4"]) == 0
    assert capsys.readouterr().err == (
        "llamado: --spec-type, --spec-draft-n-max: no effect without --latency; these tests evaluate given tokens\n"
    )
    assert cli.main(["bench", "-m", "smollm2", "--spec-type", "none"]) == 0
    assert capsys.readouterr().err == ""


def test_split_options_are_kept() -> None:
    from llamado.devices.split.placement import SplitOptions

    given = SplitOptions(rpc=("a:1",), n_gpu_layers=3)
    split = latency.split_for(given, ["b:2"], even=False)
    assert split == replace(given, rpc=("b:2",))


@pytest.mark.full
def test_own_workers() -> None:
    with latency.own_workers(2) as endpoints:
        assert len({endpoint.port for endpoint in endpoints}) == 2
        for endpoint in endpoints:
            with socket.create_connection(endpoint.address, timeout=GUARD) as client:
                client.sendall(wire.write_request(wire.Hello()))
                reader = wire.ResponseReader()
                reader.expect(wire.Command.HELLO)
                reader.feed(client.recv(36, socket.MSG_WAITALL))
                message = reader.next()
                assert message is not None and message[1].is_ours  # type: ignore[union-attr]
    for endpoint in endpoints:
        with pytest.raises(OSError):
            socket.create_connection(endpoint.address, timeout=GUARD)
