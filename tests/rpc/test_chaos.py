"""Workers, links and servers that die during answers: real processes, a real model, every byte compared.

Time limits have much room for busy machines; benchmarks/chaos.py measures times.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import waiting
from waiting import GUARD, until

from llamado.devices.device import DeviceError
from llamado.rpc.client.device import connect

pytestmark = pytest.mark.slow
HOST = "127.0.0.1"
N_PREDICT = 40
LONG = 80
"""Tokens of an answer that is to last until a worker has started again, which takes it some seconds."""
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "temperature": 0},
    {"prompt": "The capital of France is Paris. The capital of Italy is", "temperature": 0},
    {"prompt": "Write a long poem about the sea and the ships on it.\n", "temperature": 0.8, "seed": 5},
    {"prompt": "def fibonacci(n):\n", "temperature": 0},
]


class Process:
    """A command with a log."""

    def __init__(self, log: Path, command: Sequence[str]) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def expect(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.said())
            assert match or not ended, f"it ended with {self.process.returncode}:\n{self.said()[-3000:]}"
            return match

        match: re.Match[str] = until(found, f"{pattern} in {self.log.name}")
        return match

    @contextmanager
    def starting(self) -> Iterator[None]:
        """End the process if the block fails."""
        try:
            yield
        except BaseException:
            self.kill()
            raise

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill with SIGKILL."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


class Worker:
    """`llamado worker` with one thread, restarted on the same port."""

    def __init__(self, log: Path, *options: str, host: str = HOST, prefix: Sequence[str] = ()) -> None:
        self.log, self.host, self.port = log, host, 0
        self._options, self._prefix = options, prefix
        self.start()

    def start(self, *, wait: bool = True) -> None:
        command = [*self._prefix, sys.executable, "-m", "llamado", "worker", "-H", self.host, "-t", "1"]
        command.append("--no-own-files")  # weights are sent, and so is what is lost while they are
        self.log.unlink(missing_ok=True)
        self._process = Process(self.log, [*command, "-p", str(self.port), *self._options])
        if wait:
            self.wait()

    def wait(self) -> None:
        with self._process.starting():
            self.port = int(self._process.expect(rf"llamado worker on {re.escape(self.host)}:(\d+)\n")[1])

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def said(self) -> str:
        return self._process.said()

    def kill(self) -> None:
        self._process.signal(signal.SIGCONT)
        self._process.kill()

    def freeze(self) -> None:
        self._process.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.signal(signal.SIGCONT)


class Server:
    """`llamado serve` with four slots over workers."""

    def __init__(self, log: Path, model: Path, endpoints: Sequence[str], *options: str, ready: bool = True) -> None:
        command = [sys.executable, "-m", "llamado", "serve", "-m", str(model), "--port", "0", "-np", "4"]
        # Without drafts: those from earlier answers would complete the next ones before anything could happen.
        command += ["-c", "2048", "--spec-type", "none", "--rpc", ",".join(endpoints), *options]
        if "-ts" not in options:
            command += ["-ts", ",".join("1" for _ in endpoints)]
        self.process = Process(log, command)
        with self.process.starting():
            self.url = f"http://{HOST}:" + self.process.expect(r"listening on http://[^:]+:(\d+)")[1]
            self.client = httpx.Client(base_url=self.url, timeout=GUARD)
            if ready:
                until(self._ready, "ready")

    def _ready(self) -> bool:
        assert self.process.process.poll() is None, self.process.said()[-3000:]
        try:
            return self.health()[0] == 200
        except httpx.ConnectError:  # it is just ending, and will have said why
            return False

    def health(self) -> tuple[int, dict[str, Any]]:
        response = self.client.get("/health")
        return response.status_code, response.json()

    def ask(self, request: dict[str, Any], **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/completion", json=request | more, timeout=GUARD)

    def stop(self) -> int:
        self.process.signal(signal.SIGTERM)
        try:
            return self.process.process.wait(GUARD)
        finally:
            self.process.kill()
            self.client.close()


class Streams:
    """All requests at the same time, each read as it arrives."""

    def __init__(self, server: Server, n_predict: int = N_PREDICT) -> None:
        self.server = server
        self.n_predict = n_predict
        self.texts = [""] * len(REQUESTS)
        self.counts = [0] * len(REQUESTS)
        self.ends: list[dict[str, Any] | None] = [None] * len(REQUESTS)
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(len(REQUESTS))]
        for thread in self._threads:
            thread.start()

    def _read(self, i: int) -> None:
        body = REQUESTS[i] | {"stream": True, "n_predict": self.n_predict, "ignore_eos": True}
        try:
            with httpx.stream("POST", f"{self.server.url}/completion", json=body, timeout=GUARD) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    if event["stop"]:
                        self.ends[i] = event
                    self.texts[i] += event["content"]
                    self.counts[i] += not event["stop"]
        except BaseException as error:
            self.errors.append(error)

    @property
    def over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def middle(self, least: int = 8) -> None:
        """Wait until every answer has begun; none may be complete."""
        until(lambda: min(self.counts) >= least or self.errors, f"{least} tokens of each")
        assert not self.errors and not any(self.ends), "over before anything could happen"

    def finish(self, expected: Sequence[str] | None = None) -> None:
        """Check that all answers arrive with the expected bytes."""
        for thread in self._threads:
            thread.join(GUARD)
        assert self.over, f"answers that never end: {self.counts}"
        assert not self.errors, self.errors
        assert [end is not None and end["tokens_predicted"] for end in self.ends] == [self.n_predict] * len(REQUESTS)
        for text, right in zip(self.texts, expected or self.texts, strict=True):
            assert text == right if self.n_predict == LONG else text and right.startswith(text)


def noticed(server: Server, *workers: Worker) -> dict[str, Any]:
    """Wait until /health names the lost worker and the time of the loss. /health itself must not wait."""

    def fault() -> dict[str, Any] | None:
        status, body = server.health()
        return None if status == 200 else body["error"]

    error: dict[str, Any] = until(fault, "503 of /health")
    assert error["code"] == 503 and error["type"] == "unavailable_error"
    assert any(worker.endpoint in error["worker"] for worker in workers), error
    assert "gone" in error["message"] and abs(error["since"] - time.time()) < GUARD
    return error


def ring(server: Server) -> list[tuple[str, str]]:
    """Return the links between devices."""
    devices = server.client.get("/cluster").json()["devices"]
    return [(one["device"], to) for one in devices for to in one["passes_to"]]


def healthy(server: Server) -> None:
    until(lambda: server.health()[0] == 200, "200 of /health")


@pytest.fixture(scope="module")
def expected(smollm2_path: Path) -> list[str]:
    """Return the answers of this machine alone. The long ones begin with the short ones."""
    from llamado.engine.loaded_model import LoadedModel
    from llamado.engine.options import EngineOptions

    with LoadedModel.load(smollm2_path, EngineOptions(n_ctx=2048, n_slots=4)) as llama, ThreadPoolExecutor(4) as pool:
        options = {"n_predict": LONG, "ignore_eos": True}
        return [*pool.map(lambda request: llama.generate(**request | options), REQUESTS)]


@pytest.fixture(scope="module")
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


Start = Callable[..., Any]


@pytest.fixture(scope="module")
def worker(processes: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Worker]:
    def start(*options: str, **more: Any) -> Worker:
        one = Worker(tmp_path_factory.mktemp("worker") / "log", *options, **more)
        processes.callback(one.kill)
        return one

    return start


@pytest.fixture(scope="module")
def serve(processes: ExitStack, tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Callable[..., Server]:
    def start(endpoints: Sequence[str], *options: str, ready: bool = True) -> Server:
        one = Server(tmp_path_factory.mktemp("server") / "log", smollm2_path, endpoints, *options, ready=ready)
        processes.callback(one.process.kill)
        return one

    return start


def start_worker(folder: Path) -> None:
    Worker(folder / "log", prefix=[str(folder / "sleep")])


def start_server(folder: Path) -> None:
    Server(folder / "log", folder / "none.gguf", ["127.0.0.1:1"])


def start_real_worker(folder: Path) -> None:
    (folder / "sleep").rename(folder / "ggml-rpc-server")
    GgmlWorker(folder, folder / "log", HOST, 1)


@pytest.mark.parametrize("start", [start_worker, start_server, start_real_worker])
def test_a_process_that_does_not_start_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[Path], None]
) -> None:
    (tmp_path / "sleep").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "sleep").chmod(0o755)
    monkeypatch.setattr(waiting, "GUARD", 0.05)
    started: list[subprocess.Popen[bytes]] = []
    original = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(original(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    try:
        with pytest.raises(AssertionError, match=r"ready|listens|log"):
            start(tmp_path)
        assert [process.returncode for process in started] == [-signal.SIGKILL]
    finally:
        for process in started:
            process.kill()
            process.wait()


# -- workers that come back --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(worker: Start) -> tuple[Worker, Worker]:
    return worker("-m", "1G"), worker("-m", "1G")


@pytest.fixture(scope="module")
def server(pair: tuple[Worker, Worker], serve: Start) -> Iterator[Server]:
    """A server over both workers, without failover to this machine; requests wait two seconds."""
    one: Server = serve([worker.endpoint for worker in pair], "--rpc-request-wait", "2")
    yield one
    assert one.stop() == 0


@pytest.mark.full
def test_two_workers_give_the_bytes_of_one_machine(server: Server, expected: list[str]) -> None:
    assert [(a[:4], b[:4]) for a, b in ring(server)] == [("RPC0", "RPC1")]
    Streams(server, LONG).finish(expected)


@pytest.mark.full
def test_a_killed_worker_that_returns(server: Server, pair: tuple[Worker, Worker], expected: list[str]) -> None:
    streams = Streams(server)
    streams.middle()
    pair[1].kill()
    killed = time.monotonic()
    noticed(server, pair[1])
    # later requests wait two seconds, then get Retry-After
    refused: list[httpx.Response] = []
    askers = [
        threading.Thread(target=lambda stream=stream: refused.append(server.ask(REQUESTS[0], stream=stream)))  # type: ignore[misc]
        for stream in (False, True)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    waited = time.monotonic() - killed
    for response in refused:
        error = response.json()["error"]
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        assert error["type"] == "unavailable_error" and pair[1].endpoint in error["message"]
    assert waited > 1.9
    assert server.health()[0] == 503 and not any(streams.ends) and not streams.errors
    time.sleep(max(0.0, killed + 3 - time.monotonic()))
    pair[1].start(wait=False)
    streams.finish(expected)
    pair[1].wait()
    healthy(server)
    assert len(ring(server)) == 1


@pytest.mark.full
def test_both_workers_killed_and_one_again(server: Server, pair: tuple[Worker, Worker], expected: list[str]) -> None:
    streams = Streams(server)
    streams.middle()
    for one in pair:
        one.kill()
    noticed(server, *pair)
    for one in pair:
        one.start(wait=False)
    for one in pair:
        one.wait()
    healthy(server)
    before = sum(streams.counts)
    until(lambda: sum(streams.counts) > before or streams.errors, "answers that continue")
    assert not streams.errors and not streams.over
    pair[0].kill()
    noticed(server, pair[0])
    pair[0].start()
    streams.finish(expected)
    healthy(server)


@pytest.mark.full
@pytest.mark.parametrize("which", [0, 1])
def test_a_frozen_worker_that_continues(
    server: Server, pair: tuple[Worker, Worker], expected: list[str], which: int
) -> None:
    """SIGSTOP: connections stay open, but the server and linked workers get no data. A waiting request is answered."""
    streams = Streams(server)
    streams.middle()
    pair[which].freeze()
    noticed(server, pair[which])
    late: list[httpx.Response] = []
    request = REQUESTS[0] | {"n_predict": N_PREDICT, "ignore_eos": True}
    asker = threading.Thread(target=lambda: late.append(server.ask(request)))
    asker.start()
    pair[which].thaw()
    streams.finish(expected)
    asker.join()
    assert late[0].status_code == 200 and expected[0].startswith(late[0].json()["content"])
    assert late[0].json()["tokens_predicted"] == N_PREDICT
    healthy(server)
    assert len(ring(server)) == 1


@pytest.mark.full
def test_a_worker_lost_while_idle(server: Server, pair: tuple[Worker, Worker], expected: list[str]) -> None:
    pair[0].kill()
    noticed(server, pair[0])
    pair[0].start()
    healthy(server)
    answer = server.ask(REQUESTS[3], n_predict=LONG, ignore_eos=True)
    assert answer.json()["content"] == expected[3]


@pytest.mark.full
def test_a_killed_server_frees_the_memory_of_its_workers(worker: Start, serve: Start) -> None:

    def free(one: Worker) -> int:
        device = connect(one.endpoint)[0]
        try:
            return device.memory()[0]
        finally:
            device.close()

    workers = [worker("-m", "1G") for _ in range(2)]
    endpoints = [one.endpoint for one in workers]
    before = [free(one) for one in workers]
    server: Server = serve(endpoints)
    streams = Streams(server)
    streams.middle()
    assert all(free(one) < was - 50e6 for one, was in zip(workers, before, strict=True))
    server.process.kill()
    # but for the device's working memory, which all its clients use in turns
    until(lambda: all(free(one) > was - 4e6 for one, was in zip(workers, before, strict=True)), "memory is free again")
    until(lambda: streams.over, "the streams end")


# -- layers that go elsewhere ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_failover_to_the_remaining_devices(worker: Start, serve: Start, expected: list[str]) -> None:
    """One worker is killed, then the other freezes: layers move to the remaining devices, at last to this machine."""
    workers: list[Worker] = [worker(), worker()]
    server: Server = serve([one.endpoint for one in workers], "--rpc-failover", "1")
    streams = Streams(server)
    streams.middle()
    workers[1].kill()
    noticed(server, workers[1])
    streams.finish(expected)
    healthy(server)
    assert "moving its layers to the remaining devices" in server.process.said()
    streams = Streams(server)
    streams.middle()
    workers[0].freeze()
    noticed(server, workers[0])
    streams.finish(expected)
    healthy(server)
    assert server.stop() == 0


@pytest.mark.full
def test_a_worker_that_returns_gets_its_layers_back(worker: Start, serve: Start, expected: list[str]) -> None:
    """/health and the log report the layout; answers go on meanwhile."""
    workers: list[Worker] = [worker(), worker()]
    server: Server = serve([one.endpoint for one in workers], "--rpc-failover", "0.5")
    streams = Streams(server, LONG)
    streams.middle()
    workers[1].kill()

    def degraded() -> list[dict[str, Any]]:
        status, body = server.health()
        return body.get("degraded", []) if status == 200 else []

    (away,) = until(degraded, "degraded")
    assert workers[1].endpoint in away["device"] and away["why"] and abs(away["since"] - time.time()) < 60
    assert away["layers"].startswith("layer") and away["device"] not in away["now"]
    said = server.process.said()
    assert "continuing without" in said and "devices: all back" not in said
    workers[1].start(wait=False)
    until(lambda: server.health() == (200, {"status": "ok"}), "all is as it was")
    streams.finish(expected)
    assert ": back, has its layers again" in server.process.said()
    assert "devices: all back" in server.process.said()
    workers[0].kill()
    noticed(server, workers[0])
    streams = Streams(server, LONG)
    until(degraded, "degraded")
    workers[0].start(wait=False)
    streams.finish(expected)
    until(lambda: server.health() == (200, {"status": "ok"}), "all is as it was")
    assert server.stop() == 0


# -- the link ----------------------------------------------------------------------------------------------------------


class LimitedLink:
    """A proxy to a worker that passes a number of bytes, then calls `at_end`."""

    def __init__(self, target: Callable[[], tuple[str, int]]) -> None:
        self._target = target
        self._listener = socket.create_server((HOST, 0))
        self.endpoint = f"{HOST}:{self._listener.getsockname()[1]}"
        self.left: float = float("inf")
        self.at_end: Callable[[], None] = lambda: None
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    worker = socket.create_connection(self._target())
                except OSError:
                    client.close()
                    continue
                for source, target in ((client, worker), (worker, client)):
                    threading.Thread(target=self._pump, args=(source, target, target is worker), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
                if counts:
                    self.left -= len(data)
                    if self.left < 0:
                        self.left = float("inf")
                        self.at_end()
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def linked(worker: Start, processes: ExitStack) -> tuple[LimitedLink, Worker, Worker]:
    """A worker behind a link, and another one."""
    behind, other = worker(), worker()
    link = LimitedLink(lambda: (HOST, behind.port))
    processes.callback(link.close)
    return link, behind, other


@pytest.mark.full
def test_a_worker_killed_during_the_first_load_ends_the_server(
    linked: tuple[LimitedLink, Worker, Worker], serve: Start
) -> None:
    """The error names the worker."""
    link, behind, other = linked
    link.at_end, link.left = behind.kill, 20e6
    server: Server = serve([link.endpoint, other.endpoint], "--rpc-wait", "0", ready=False)
    assert server.process.process.wait(GUARD) == 1
    said = server.process.said()
    assert f"worker RPC0[{link.endpoint}] is lost" in said and "Traceback" not in said
    behind.start()


@pytest.mark.full
def test_a_worker_killed_during_a_reload(
    linked: tuple[LimitedLink, Worker, Worker], serve: Start, expected: list[str]
) -> None:
    link, behind, other = linked
    server: Server = serve([link.endpoint, other.endpoint])
    streams = Streams(server)
    streams.middle()

    def again() -> None:
        behind.kill()
        link.at_end = other.kill
        link.left = 30e6
        behind.start(wait=False)

    link.at_end = again
    behind.kill()
    until(lambda: server.health()[0] == 503, "503")
    link.left = 20e6
    behind.start(wait=False)
    until(lambda: other._process.process.poll() is not None, "the other dies, too")
    other.start(wait=False)
    streams.finish(expected)
    healthy(server)
    assert server.stop() == 0
    other.wait()
    behind.wait()


class Namespace(NamedTuple):
    name: str
    cable: str
    address: str


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    """A network namespace with one cable to ours. Skips if the system has none that carries data."""
    number = os.getpid() % 16384
    net = f"10.213.{number // 64}.{number % 64 * 4}"
    here, there = (f"{net.rpartition('.')[0]}.{int(net.rpartition('.')[2]) + i}" for i in (1, 2))
    name, ours, theirs = f"llamado{os.getpid()}", f"ll{os.getpid() % 100000}a", f"ll{os.getpid() % 100000}b"
    commands = [
        f"ip netns add {name}",
        f"ip link add {ours} type veth peer name {theirs} netns {name}",
        f"ip address add {here}/30 dev {ours}",
        f"ip link set {ours} up",
        f"ip -n {name} address add {there}/30 dev {theirs}",
        f"ip -n {name} link set {theirs} up",
    ]
    if shutil.which("ip") is None:
        pytest.skip("CABLE NOT PULLED: the command ip is not there")
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"CABLE NOT PULLED: {command}: {done.stderr.strip()}; it takes root's rights")
        try:
            socket.create_connection((there, 9), 5).close()
        except ConnectionRefusedError:
            pass  # the port is closed, as the other end has reported
        except OSError as error:
            pytest.skip(f"CABLE NOT PULLED: packets do not reach the other network: {error}")
        yield Namespace(name, theirs, there)
    finally:
        subprocess.run(["ip", "link", "delete", ours], capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.full
def test_a_pulled_cable(
    namespace: Namespace, worker: Start, serve: Start, expected: list[str], pair: tuple[Worker, Worker]
) -> None:
    """Packets are lost without an error. The cable returns once, and once it does not."""
    name, cable, address = namespace
    away: Worker = worker(host=address, prefix=["ip", "netns", "exec", name])
    server: Server = serve([away.endpoint, pair[0].endpoint], "--rpc-failover", "3")

    def pull(state: str) -> None:
        subprocess.run(["ip", "-n", name, "link", "set", cable, state], check=True)

    streams = Streams(server)
    streams.middle()
    pull("down")
    noticed(server, away)
    pull("up")
    streams.finish(expected)
    healthy(server)
    assert "continuing without" not in server.process.said()
    streams = Streams(server)
    streams.middle()
    pull("down")
    noticed(server, away)
    streams.finish(expected)
    assert "continuing without" in server.process.said()
    assert server.stop() == 0
    away.kill()


class GgmlWorker:
    """ggml-rpc-server with one thread. It may die of SIGPIPE when it responds to a client that is gone."""

    def __init__(self, programs: Path, log: Path, host: str, port: int, prefix: Sequence[str] = ()) -> None:
        program = str(programs / "ggml-rpc-server")
        self._log, self._address = log, (host, port)
        self._command = [*prefix, program, "-H", host, "-p", str(port), "-t", "1"]
        self.endpoint = f"{host}:{port}"
        self.start()

    def start(self) -> None:
        self._process = Process(self._log, self._command)

        def listens() -> bool:
            with suppress(OSError):
                socket.create_connection(self._address, 1).close()
                return True
            return False

        with self._process.starting():
            until(listens, "the real worker listens")

    def kill(self) -> None:
        self._process.kill()

    def revive(self) -> None:
        if self._process.process.poll() is not None:
            self.start()


def are_complete(server: Server, streams: Streams, real: GgmlWorker) -> None:
    """Check that all answers are complete. ggml's bits depend on the other sequences of a batch."""
    until(lambda: streams.over or real.revive(), "the answers end")
    streams.finish()
    healthy(server)
    assert server.stop() == 0


@pytest.mark.full
@pytest.mark.interop
def test_a_killed_ggml_worker_that_returns_busy(
    peer_bin: Path, pair: tuple[Worker, Worker], serve: Start, tmp_path: Path
) -> None:
    """It serves one client at a time: the server waits in its queue instead of reconnecting."""
    with socket.create_server((HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
    real = GgmlWorker(peer_bin, tmp_path / "log", HOST, port)
    try:
        server: Server = serve([real.endpoint, pair[0].endpoint])
        streams = Streams(server)
        streams.middle()
        real.kill()
        error = until(lambda: server.health()[1].get("error"), "503 of /health")
        assert real.endpoint in error["worker"]
        with ExitStack() as stack:
            first: list[Any] = []

            def ours() -> bool:
                """Return True if another client connected before the server."""
                real.revive()
                with suppress(DeviceError):
                    first.extend(connect(real.endpoint, timeout=2))
                if first and server.health()[0] == 503:
                    return True
                while first:
                    first.pop().close()
                return server.health()[0] == 200

            until(ours, "a client is connected")
            stack.callback(lambda: [device.close() for device in first])
            time.sleep(5 if first else 0)
            assert not first or "busy with another client" in server.health()[1]["error"]["message"]
        are_complete(server, streams, real)
    finally:
        real.kill()


@pytest.mark.full
@pytest.mark.interop
def test_a_pulled_cable_of_a_ggml_worker(
    peer_bin: Path, namespace: Namespace, pair: tuple[Worker, Worker], serve: Start, tmp_path: Path
) -> None:
    """It has no second connection for heartbeats: the loss shows in the kernel's TCP state."""
    name, cable, address = namespace
    real = GgmlWorker(peer_bin, tmp_path / "log", address, 50052, ["ip", "netns", "exec", name])
    try:
        server: Server = serve([real.endpoint, pair[0].endpoint])
        streams = Streams(server)
        streams.middle()
        subprocess.run(["ip", "-n", name, "link", "set", cable, "down"], check=True)
        error = until(lambda: server.health()[1].get("error"), "503 of /health")
        assert real.endpoint in error["worker"]
        subprocess.run(["ip", "-n", name, "link", "set", cable, "up"], check=True)
        are_complete(server, streams, real)
    finally:
        real.kill()
