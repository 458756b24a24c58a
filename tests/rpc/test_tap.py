"""The tap between a client and a worker that records received bytes and their times.

Times are compared only with lower bounds, or with each other if one must be a multiple of the other.
"""

from __future__ import annotations

import json
import logging
import lzma
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import first_of
from waiting import GUARD, until

from llamado.rpc import wire
from llamado.rpc.tap.framing import Message, RequestFramer, ResponseFramer
from llamado.rpc.tap.link import Link
from llamado.rpc.tap.proxy import Tap, TapError, TapOptions, parse_bandwidth
from llamado.rpc.tap.tracing import RequestDecoder, TraceError

HOST = "127.0.0.1"
CAPTURE = Path(__file__).parents[1] / "ggml" / "captures" / "smollm2-135m-instruct-q4_1.graph_0.bin.xz"
TENSOR = wire.WireTensor(1, 0, 77, (4, 1, 1, 1), (4, 16, 16, 16), 1000, name=b"blk.0.weight")
HELLO = wire.write_request(wire.Hello())
COUNT = wire.write_request(wire.DeviceCount())
RECOMPUTE = wire.write_request(wire.GraphRecompute(0))


def set_tensor(data: bytes) -> bytes:
    return wire.write_request(wire.SetTensor(TENSOR, 0, 8, len(data))) + data


def graph(n: int = 3) -> bytes:
    """Return a chain of n nodes: two kinds of operations, and one node whose tensor is not sent."""
    tensors = [TENSOR._replace(id=i, op=2 + i % 2) for i in range(1, n)]
    records = np.frombuffer(b"".join(t.pack() for t in tensors), wire.TENSOR)
    return wire.write_request(wire.graph_request(0, np.arange(1, n + 1, dtype=np.uint64), records))


class FakeWorker:
    """Records all bytes of every connection and their times. Responds, or with `echo` sends all bytes back."""

    def __init__(self, *, echo: bool = False) -> None:
        self.echo = echo
        self.streams: list[bytearray] = []
        self.requests: list[tuple[float, wire.Request]] = []
        self.sockets: list[socket.socket] = []
        self.ended = threading.Semaphore(0)
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(GUARD)
        self._listener.close()
        for one in self.sockets:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            self.sockets.append(one)
            self.streams.append(bytearray())
            threading.Thread(target=self._serve, args=(one, self.streams[-1]), daemon=True).start()

    def _serve(self, one: socket.socket, stream: bytearray) -> None:
        reader = wire.RequestReader()
        try:
            while data := one.recv(1 << 16):
                stream += data
                if self.echo:
                    one.sendall(data)
                    continue
                reader.feed(data)
                reader.drop()
                while (request := reader.next()) is not None:
                    self.requests.append((time.perf_counter(), request))
                    one.sendall(answer(request))
                    reader.drop()
        except (OSError, wire.WireError):
            pass
        finally:
            one.close()
            self.ended.release()


def answer(request: wire.Request) -> bytes:
    command = wire.COMMANDS[type(request)]
    if isinstance(request, wire.Hello):
        return wire.write_response(command, wire.HelloResponse(*wire.LATEST.version, wire.LLAMADO))
    if isinstance(request, wire.GetTensor):
        return wire.write_response(command, wire.TensorData(request.size)) + bytes(range(256)) * (request.size // 256)
    if isinstance(request, wire.AllocBuffer):
        return wire.write_response(command, wire.AllocResponse(4096, request.size))
    if isinstance(request, wire.GetDeviceMemory):
        return wire.write_response(command, wire.DeviceMemory(10, 20))
    return wire.write_response(command, wire.Number(1)) if wire.has_response(command) else b""


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    with closing(FakeWorker()) as one:
        yield one


def captured() -> bytes:
    """Return a graph of llama.cpp's server, with 8.0's uid behind the device."""
    payload = lzma.decompress(CAPTURE.read_bytes())
    assert len(payload) == 404_036
    return struct.pack("<BQ", 10, len(payload) + 8) + payload[:4] + bytes(8) + payload[4:]


@contextmanager
def tapped(worker: FakeWorker, **options: Any) -> Iterator[tuple[Tap, socket.socket]]:
    """Yield a tap in front of the worker, and a connection to it."""
    with Tap(TapOptions(listen_port=0, target_port=worker.port, **options)) as tap, connect(tap.port) as client:
        yield tap, client


def connect(port: int) -> socket.socket:
    client = socket.create_connection((HOST, port), timeout=GUARD)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def read(client: socket.socket, n: int) -> bytes:
    data = bytearray()
    while len(data) < n:
        more = client.recv(n - len(data))
        assert more, f"closed after {len(data)} of {n} bytes"
        data += more
    return bytes(data)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def kinds(worker: FakeWorker) -> list[type]:
    return [type(request) for _, request in worker.requests]


# --- traffic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"latency_ms": 1}, {"latency_ms": 1, "jitter_ms": 2, "all": True},
                                     {"bandwidth": 1e9}])  # fmt: skip
def test_every_byte_passes_unchanged_and_in_order(worker: FakeWorker, options: dict[str, Any]) -> None:
    bulk = np.random.default_rng(0).bytes(3_000_000)
    fetch = wire.write_request(wire.GetTensor(TENSOR, 0, 512))
    real = captured()
    stream = HELLO + set_tensor(b"abc") + set_tensor(bulk) + graph() + RECOMPUTE + set_tensor(b"") + real + fetch
    with tapped(worker, **options) as (tap, client):
        for at in range(0, len(stream), 700_001):
            client.sendall(stream[at : at + 700_001])
        assert read(client, 36) == answer(wire.Hello())
        assert read(client, 520) == answer(wire.GetTensor(TENSOR, 0, 512))
    assert bytes(worker.streams[0]) == stream
    assert {wire.Command(c).name: row.count for c, row in tap.summary.rows.items()} == {
        "HELLO": 1, "SET_TENSOR": 3, "GRAPH_COMPUTE": 2, "GRAPH_RECOMPUTE": 1, "GET_TENSOR": 1
    }  # fmt: skip


def test_byte_by_byte(worker: FakeWorker) -> None:
    stream = HELLO + set_tensor(b"abc") + graph() + RECOMPUTE + COUNT
    with tapped(worker, latency_ms=1) as (_, client):
        for byte in stream:
            client.sendall(bytes([byte]))
        assert read(client, 36 + 12)[36:] == answer(wire.DeviceCount())
    assert bytes(worker.streams[0]) == stream


def test_many_connections_at_once(worker: FakeWorker) -> None:
    with tapped(worker, latency_ms=2) as (tap, _):
        clients = [connect(tap.port) for _ in range(20)]
        for client in clients:
            client.sendall(HELLO + RECOMPUTE + COUNT)
        for client in clients:
            assert read(client, 48)[36:] == answer(wire.DeviceCount())
            client.close()
        assert tap.summary.connections == 21


# --- when it passes ---------------------------------------------------------------------------------------------------


def test_only_graphs_are_delayed_and_nothing_overtakes(worker: FakeWorker) -> None:
    latency = 0.15
    with tapped(worker, latency_ms=1e3 * latency) as (_, client):
        client.sendall(HELLO + COUNT)
        read(client, 48)
        began = time.perf_counter()
        client.sendall(set_tensor(b"before"))
        until(lambda: len(worker.requests) == 3)
        # A message that is not delayed passes while a graph that was sent after it has not.
        client.sendall(graph() + COUNT + RECOMPUTE + set_tensor(b"after"))
        read(client, 12)
        until(lambda: len(worker.requests) == 7)
    arrived = {i: at - began for i, (at, _) in enumerate(worker.requests[2:])}
    assert kinds(worker)[2:] == [
        wire.SetTensor,
        wire.GraphCompute,
        wire.DeviceCount,
        wire.GraphRecompute,
        wire.SetTensor,
    ]
    assert arrived[0] < arrived[1]
    assert all(arrived[i] >= latency for i in (1, 2, 3, 4))


def test_only_graphs_take_the_delay(worker: FakeWorker) -> None:
    """With a delay of a minute, other messages take none."""
    with tapped(worker, latency_ms=60_000) as (_, client):
        client.sendall(HELLO + set_tensor(b"weights") + COUNT)
        assert len(read(client, 48)) == 48
        client.sendall(RECOMPUTE)
        client.sendall(COUNT)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
    assert kinds(worker) == [wire.Hello, wire.SetTensor, wire.DeviceCount]


def test_several_are_in_flight_at_once(worker: FakeWorker) -> None:
    """Messages sent together arrive together: latency is not occupancy."""
    n, latency = 1200, 0.1
    with tapped(worker, latency_ms=1e3 * latency) as (_, client):
        client.sendall(HELLO)
        read(client, 36)
        began = time.perf_counter()
        for _ in range(n):
            client.sendall(RECOMPUTE)
        client.sendall(COUNT)
        read(client, 12)
        seconds = time.perf_counter() - began
    assert kinds(worker)[1:-1] == [wire.GraphRecompute] * n
    assert latency <= seconds < n * latency


def test_with_all_everything_is_delayed_both_ways(worker: FakeWorker) -> None:
    latency = 0.06
    with tapped(worker, latency_ms=1e3 * latency, all=True) as (_, client):
        began = time.perf_counter()
        client.sendall(HELLO)
        read(client, 36)
        assert time.perf_counter() - began >= 2 * latency
        began = time.perf_counter()
        client.sendall(set_tensor(b"x") + RECOMPUTE + COUNT)
        read(client, 12)
        assert time.perf_counter() - began >= 2 * latency
    assert all(at - began >= latency for at, _ in worker.requests[1:])


def test_bandwidth_holds_bytes_back(worker: FakeWorker) -> None:
    n, bits = 200_000, 16e6
    with tapped(worker, bandwidth=bits) as (_, client):
        client.sendall(HELLO)
        read(client, 36)
        began = time.perf_counter()
        client.sendall(set_tensor(bytes(n)) + COUNT)
        read(client, 12)
        assert time.perf_counter() - began >= 8 * n / bits


def test_a_link_serializes_bytes_but_not_latency() -> None:
    link = Link(latency=1.0, bandwidth=8e3)  # a kilobyte a second
    assert link.due(1000, 10.0, delayed=False) == 11.0
    assert link.due(1000, 10.0, delayed=True) == 13.0
    assert link.due(500, 10.5, delayed=True) == 13.5
    assert link.due(1000, 20.0, delayed=True) == 22.0  # it was free again
    free = Link(latency=1.0)
    assert [free.due(10**9, 5.0, delayed=True) for _ in range(3)] == [6.0] * 3
    assert free.due(1, 5.0, delayed=False) == 5.0


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(0, 100))
def test_jitter_comes_on_top_of_the_latency(seed: int) -> None:
    link = Link(latency=2.0, jitter=0.5, seed=seed)
    dues = [link.due(1, 0.0, delayed=True) for _ in range(20)]
    assert all(2.0 <= due <= 2.5 for due in dues) and len(set(dues)) > 1
    assert link.due(1, 0.0, delayed=False) == 0.0


def test_jitter_never_reorders(worker: FakeWorker) -> None:
    with tapped(worker, latency_ms=1, jitter_ms=30) as (_, client):
        client.sendall(HELLO)
        for i in range(30):
            client.sendall(wire.write_request(wire.GraphRecompute(i)))
        until(lambda: len(worker.requests) == 31)
    assert [request.device for _, request in worker.requests[1:]] == list(range(30))  # type: ignore[union-attr]


# --- ends -------------------------------------------------------------------------------------------------------------


def test_bytes_in_flight_are_delivered_after_a_close(worker: FakeWorker) -> None:
    with tapped(worker, latency_ms=100) as (_, client):
        client.sendall(HELLO + RECOMPUTE + RECOMPUTE + set_tensor(b"last"))
        client.close()
        assert worker.ended.acquire(timeout=GUARD)
    assert kinds(worker) == [wire.Hello, wire.GraphRecompute, wire.GraphRecompute, wire.SetTensor]


def test_a_truncated_graph_is_delivered(worker: FakeWorker) -> None:
    stream = HELLO + RECOMPUTE + graph()[:-5]
    with tapped(worker, latency_ms=10) as (_, client):
        client.sendall(stream)
        client.close()
        assert worker.ended.acquire(timeout=GUARD)
    assert bytes(worker.streams[0]) == stream


@pytest.mark.parametrize("reset", [False, True])
def test_the_client_sees_the_end_of_the_worker(worker: FakeWorker, reset: bool) -> None:
    with tapped(worker, latency_ms=50, all=True) as (tap, client):
        client.sendall(HELLO)
        until(lambda: wire.Command.HELLO in tap.summary.rows and tap.summary.rows[wire.Command.HELLO].mean is not None)
        if reset:
            worker.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        worker.sockets[0].shutdown(socket.SHUT_RDWR)
        # The response was in flight.
        assert read(client, 36) == answer(wire.Hello())
        assert client.recv(1) == b""


def test_half_a_close_does_not_lose_the_response(worker: FakeWorker) -> None:
    with tapped(worker, latency_ms=20) as (_, client):
        client.sendall(HELLO + RECOMPUTE + COUNT)
        client.shutdown(socket.SHUT_WR)
        assert read(client, 48)[36:] == answer(wire.DeviceCount())
        assert client.recv(1) == b""


def test_the_tap_stays_when_there_is_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    worker = FakeWorker()
    worker.close()
    logging.getLogger("llamado").propagate = True
    with tapped(worker) as (tap, client):
        with caplog.at_level(logging.WARNING, "llamado.rpc.tap.proxy"):
            try:
                assert client.recv(1) == b""
            except ConnectionResetError:
                pass
        assert f"no worker at {HOST}:{worker.port}" in caplog.text
        # It comes up later.
        with closing(FakeWorker()) as other:
            object.__setattr__(tap.options, "target_port", other.port)
            with connect(tap.port) as again:
                again.sendall(HELLO)
                assert read(again, 36) == answer(wire.Hello())


def test_closing_the_tap_ends_its_connections(worker: FakeWorker) -> None:
    with tapped(worker) as (tap, client):
        client.sendall(HELLO)
        read(client, 36)
        tap.close()
        assert client.recv(1) == b""
        assert worker.ended.acquire(timeout=GUARD)


def test_a_port_in_use(worker: FakeWorker) -> None:
    with pytest.raises(TapError, match=rf"cannot listen on {HOST}:{worker.port}.*--listen-port"):
        Tap(TapOptions(listen_port=worker.port))


def test_invalid_options(tmp_path: Path) -> None:
    with pytest.raises(TapError, match="--latency-ms -1"):
        Tap(TapOptions(listen_port=0, latency_ms=-1))
    with pytest.raises(TapError, match="--jitter-ms nan"):
        Tap(TapOptions(listen_port=0, jitter_ms=float("nan")))
    with pytest.raises(TraceError, match="--trace"):
        Tap(TapOptions(listen_port=0, trace=str(tmp_path / "no" / "such" / "folder")))


def test_bandwidths() -> None:
    assert [parse_bandwidth(text) for text in ("1G", "100M", "2.5g", "64k", "1000")] == [1e9, 1e8, 2.5e9, 64e3, 1e3]
    for bad in ("", "G", "fast", "0", "-1M", "1e999", "nan", "1MB"):
        with pytest.raises(TapError, match="--bandwidth"):
            parse_bandwidth(bad)


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x0a" + b"\xff" * 8,
                                   b"\x0a", b"\x10\x00", b"GET / HTTP/1.1\r\n\r\n"])  # fmt: skip
@pytest.mark.parametrize("latency", [0, 5])
def test_other_protocols_pass_unchanged(start: bytes, latency: float, tmp_path: Path) -> None:
    noise = start + np.random.default_rng(len(start)).bytes(50_000)
    trace = tmp_path / "trace"
    with closing(FakeWorker(echo=True)) as worker:
        with tapped(worker, latency_ms=latency, trace=str(trace)) as (_, client):
            client.sendall(noise)
            client.shutdown(socket.SHUT_WR)
            assert read(client, len(noise)) == noise
            assert client.recv(1) == b""
        assert bytes(worker.streams[0]) == noise
    assert any("note" in line for line in lines(trace))


def test_garbage_is_not_held_back() -> None:
    """Bytes that cannot be a graph pass at once, without waiting for a complete head."""
    with closing(FakeWorker(echo=True)) as worker, tapped(worker, latency_ms=60_000) as (_, client):
        client.sendall(b"\x16\x03")
        assert read(client, 2) == b"\x16\x03"


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=40) | st.sampled_from([HELLO, COUNT, RECOMPUTE, graph(), set_tensor(b"xyz")])),
    st.lists(st.integers(0, 3000)),
)
def test_cut_messages_hold_every_byte_once(parts: list[bytes], at: list[int]) -> None:
    stream = b"".join(parts)
    places = sorted({a % (len(stream) + 1) for a in at})
    for make in (RequestFramer, ResponseFramer):
        awaiting: deque[Message] = deque()
        if make is ResponseFramer:
            for command in (14, 8, 0, 18):
                awaiting.append(Message(struct.Struct("<BQ"), command, 0.0))
        cutter = make(awaiting)
        passed = bytearray()
        for a, b in zip([0, *places], [*places, len(stream)], strict=True):
            data = memoryview(stream)[a:b]
            while data:
                taken = cutter.take(data, 0.0)
                if taken is None:
                    passed += data
                    break
                message, n = taken
                assert 0 < n <= len(data)
                assert len(message.kept) <= message.seen
                if message.is_complete:
                    assert message.seen == message.size
                passed += data[:n]
                data = data[n:]
        assert passed == stream


def test_a_response_to_an_unknown_request_ends_the_decoding() -> None:
    """Its length is unknown, so later responses cannot be split."""
    awaiting: deque[Message] = deque()
    requests, responses = RequestFramer(awaiting), ResponseFramer(awaiting)
    for request in (COUNT, struct.pack("<BQ", 200, 0), COUNT):
        requests.take(memoryview(request), 0.0)
    count = memoryview(struct.pack("<QI", 4, 1))
    first = responses.take(count, 1.0)
    assert first is not None and first[0].command == wire.Command.DEVICE_COUNT and not responses.lost
    assert responses.take(memoryview(b"anything"), 1.0) is None and responses.lost
    assert responses.take(count, 1.0) is None


def test_an_invalid_request_is_noted_and_the_next_is_decoded() -> None:
    log = RequestDecoder()
    assert "before HELLO" in log.describe(whole(COUNT))["note"]
    bad = struct.pack("<BQ", 10, 20) + bytes(12) + struct.pack("<II", 2**32 - 1, 0)
    assert "cannot hold" in log.describe(whole(bad))["note"]
    assert "it has 24" in log.describe(whole(struct.pack("<BQ", 14, 0)))["note"]
    assert log.describe(whole(RECOMPUTE)) == {"device": 0, "uid": 0}


def whole(stream: bytes) -> Message:
    message, n = RequestFramer(deque()).take(memoryview(stream), 0.0)
    assert message.is_complete and n == len(stream)
    return message


# --- trace and summary ------------------------------------------------------------------------------------------------


def test_the_trace(worker: FakeWorker, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    fetch = wire.write_request(wire.GetTensor(TENSOR, 16, 256))
    alloc = wire.write_request(wire.AllocBuffer(0, 1 << 20))
    before = time.time()
    with tapped(worker, latency_ms=20, trace=str(trace)) as (_, client):
        client.sendall(HELLO + alloc + set_tensor(b"12345") + graph(5) + RECOMPUTE + fetch)
        read(client, 36 + 24 + 8 + 256)
    found = lines(trace)
    assert all(before - 1 < line["time"] < time.time() + 1 and line["connection"] == 1 for line in found)
    sent = [line for line in found if line["direction"] == "request"]
    answered = [line for line in found if line["direction"] == "response"]
    assert [line["command"] for line in sent] == [
        "HELLO", "ALLOC_BUFFER", "SET_TENSOR", "GRAPH_COMPUTE", "GRAPH_RECOMPUTE", "GET_TENSOR"
    ]  # fmt: skip
    assert [line["command"] for line in answered] == ["HELLO", "ALLOC_BUFFER", "GET_TENSOR"]
    assert sent[1].items() >= {"device": 0, "size": 1 << 20}.items()
    assert sent[2]["tensor"] == {"name": "blk.0.weight", "type": "F32", "ne": [4, 1, 1, 1], "buffer": 77}
    assert (sent[2]["offset"], sent[2]["size"], sent[2]["bytes"]) == (8, 5, 9 + 305 + 5)
    assert (sent[3]["n_nodes"], sent[3]["n_tensors"]) == (5, 4)
    assert sent[3]["ops"] == {"ADD": 2, "ADD_ID": 2, "missing": 1}
    assert sent[3]["delay_ms"] >= 20 and sent[4]["delay_ms"] >= 20 and sent[2]["delay_ms"] == 0
    assert (sent[5]["offset"], sent[5]["size"]) == (16, 256)
    assert answered[0]["value"] == {"version": "8.0.0", "llamado": True}
    assert answered[1]["value"] == {"ptr": 4096, "size": 1 << 20}
    assert answered[2]["bytes"] == 8 + 256 and answered[2]["after_ms"] >= 20


def test_the_histogram_of_a_real_graph(tmp_path: Path, worker: FakeWorker) -> None:
    trace = tmp_path / "trace"
    with tapped(worker, trace=str(trace)) as (_, client):
        client.sendall(HELLO + captured() + COUNT)
        read(client, 48)
    (line,) = (line for line in lines(trace) if line["command"] == "GRAPH_COMPUTE")
    assert (line["n_nodes"], line["n_tensors"]) == (997, 1338)
    assert line["ops"]["MUL_MAT"] == 30 * 7 + 1 and sum(line["ops"].values()) == 997


def test_a_wrong_response_is_noted(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with closing(FakeWorker(echo=True)) as worker, tapped(worker, trace=str(trace)) as (_, client):
        client.sendall(HELLO)
        read(client, len(HELLO))
    # The echo's first eight bytes are a length that never comes.
    assert any("closed in the middle of the response to HELLO" in line.get("note", "") for line in lines(trace))


def test_the_summary(worker: FakeWorker) -> None:
    from rich.console import Console

    with tapped(worker, latency_ms=10) as (tap, client):
        client.sendall(HELLO + graph() + RECOMPUTE * 3 + COUNT)
        read(client, 48)
        client.sendall(set_tensor(bytes(20 << 20)) + COUNT)
        read(client, 12)
    rows = {wire.Command(command).name: row for command, row in tap.summary.rows.items()}
    assert rows["DEVICE_COUNT"].count == 2
    assert rows["DEVICE_COUNT"].bytes == 2 * (9 + 12)
    mean, most = rows["DEVICE_COUNT"].mean, rows["DEVICE_COUNT"].most
    assert mean is not None and most is not None and most >= 0.01 and mean >= 0.005
    assert rows["GRAPH_RECOMPUTE"].mean is None
    rate = rows["SET_TENSOR"].rate
    assert rate is not None and rate > 0
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(tap.summary.table())
    text = console.export_text()
    assert "GRAPH_RECOMPUTE" in text and "1 graphs, 3 runs" in text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", first_of([signal.SIGINT, signal.SIGTERM]))
def test_the_command(worker: FakeWorker, number: signal.Signals, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    command = [
        sys.executable,
        "-m",
        "llamado",
        "tap",
        "--listen-port",
        "0",
        "--target-port",
        str(worker.port),
    ]
    command += ["--latency-ms", "5", "--jitter-ms", "1", "--trace", str(trace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            assert "listening on" in line and "graphs 5 ms late and up to 1 ms more" in line
            with connect(int(line.partition("listening on")[2].split(":")[1].split(",")[0])) as client:
                client.sendall(HELLO + RECOMPUTE + COUNT)
                read(client, 48)
                process.send_signal(number)
                printed, _ = process.communicate(timeout=GUARD)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "GRAPH_RECOMPUTE" in printed and "1 connections" in printed
    assert [line["command"] for line in lines(trace)].count("DEVICE_COUNT") == 2


def test_delayed_commands() -> None:
    """Graphs to a worker, and tensors from one worker to the next; not the requests about them."""
    for everything in (False, True):
        with Tap(TapOptions(listen_port=0, all=everything)) as tap:
            found = {command for command in wire.Command if tap.delays(command)}
        graphs = {wire.Command.GRAPH_COMPUTE, wire.Command.GRAPH_RECOMPUTE, wire.Command.DELIVER}
        assert found == (set() if everything else graphs)  # with `all` bytes are, as they come


def test_the_trace_of_each_version(tmp_path: Path) -> None:
    """The greeting decides the version of graphs."""
    for protocol, uid in ((wire.V7, 0), (wire.V8, 9)):
        log = RequestDecoder()
        log.describe(whole(HELLO))
        responses = ResponseFramer(deque([whole(HELLO)]))
        said = wire.write_response(wire.Command.HELLO, wire.HelloResponse(*protocol.version))
        log.greeted(responses.take(memoryview(said), 0.0)[0])  # type: ignore[index]
        nodes, records = np.zeros(0, np.uint64), np.zeros(0, wire.TENSOR)
        for request in (wire.graph_request(3, nodes, records, uid), wire.GraphRecompute(3, uid)):
            found = log.describe(whole(wire.write_request(request, protocol)))
            assert "note" not in found and (found["device"], found["uid"]) == (3, uid)
