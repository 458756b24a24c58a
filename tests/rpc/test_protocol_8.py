"""Protocol 8.0: our worker driven byte by byte as in the public description, and our client with a translator."""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import free_port
from translator import GRAPH_COMPUTE, GRAPH_RECOMPUTE, Translator
from waiting import GUARD, until
from wire_client import layout, records, running

from llamado.client.health import Phase
from llamado.cluster.greeting import greet, probe_hello
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import DeviceLost
from llamado.flags import FLAGS
from llamado.ggml import Graph
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T
from llamado.rpc import wire
from llamado.rpc.client.device import RemoteDevice, connect
from llamado.rpc.client.sent_graphs import SentGraphs
from llamado.rpc.worker import comm, graph_cache
from llamado.rpc.worker.comm import bf16
from llamado.rpc.worker.greetings import Greetings
from llamado.rpc.worker.server import Worker, WorkerOptions

ALLOC, BASE, FREE, SET, GET, COMPUTE, HELLO, COUNT, RECOMPUTE = 0, 3, 4, 6, 8, 10, 14, 15, 16
SET_2D, GET_2D, COMM_INIT, COMM_ALLREDUCE, COMM_FREE = 18, 19, 20, 21, 22


class DescribedClient:
    """A client as ggml's, in 8.0 unless told otherwise."""

    def __init__(self, worker: Worker, major: int = 8) -> None:
        self.sock = socket.create_connection(("127.0.0.1", worker.port), timeout=60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.hello = self.ask(HELLO, bytes(24))
        if self.hello[0] != major:
            self.sock.close()

    def __enter__(self) -> DescribedClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def tell(self, command: int, payload: bytes = b"") -> None:
        self.sock.sendall(struct.pack("<BQ", command, len(payload)) + payload)

    def ask(self, command: int, payload: bytes = b"") -> bytes:
        self.tell(command, payload)
        (size,) = struct.unpack("<Q", self.exactly(8))
        return self.exactly(size)

    def exactly(self, n: int) -> bytes:
        found = b""
        while len(found) < n:
            data = self.sock.recv(n - len(found))
            if not data:
                raise ConnectionResetError
            found += data
        return found

    def alloc(self, size: int) -> tuple[int, int]:
        ptr, given = struct.unpack("<QQ", self.ask(ALLOC, struct.pack("<IQ", 0, size)))
        assert given >= size
        return ptr, struct.unpack("<Q", self.ask(BASE, struct.pack("<Q", ptr)))[0]

    def closed(self) -> bool:
        """Return True if the worker closes the connection instead of a response."""
        try:
            self.ask(COUNT)
        except ConnectionError:
            return True
        return False


def tensor(ptr: int, at: int, n: int, type: int = 0, width: int = 4) -> bytes:
    """Return the 296 bytes of a vector."""
    ne, nb = (n, 1, 1, 1), (width, n * width, n * width, n * width)
    return struct.pack("<QIQ4I4I", 1, type, ptr, *ne, *nb) + bytes(4 + 64 + 4 + 80 + 16) + struct.pack(
        "<Q", at) + b"t".ljust(64, b"\0") + bytes(4)  # fmt: skip


class ScaledGraph:
    """r = a · factor, as 8.0 sends it, in shared memory."""

    def __init__(self, client: DescribedClient, memory: tuple[int, int], at: int, factor: float) -> None:
        self.client, (ptr, base) = client, memory
        a, graph = g.new_tensor(T.F32, 8, name="a"), Graph()
        r = graph.output("r", g.scale(a, factor))
        places, _ = layout([a, r])
        places = {t: at + place for t, place in places.items()}
        nodes, tensors = records(graph, ptr, base, places)
        self.body = (
            struct.pack("<I", len(nodes)) + nodes.tobytes() + struct.pack("<I", len(tensors)) + tensors.tobytes()
        )
        self.a, self.r = (tensor(ptr, base + places[t], 8) for t in (a, r))

    def write(self, value: float) -> None:
        self.client.tell(SET, self.a + struct.pack("<BQ", 0, 0) + np.full(8, value, np.float32).tobytes())

    def compute(self, uid: int) -> None:
        self.client.tell(COMPUTE, struct.pack("<IQ", 0, uid) + self.body)

    def again(self, uid: int) -> None:
        self.client.tell(RECOMPUTE, struct.pack("<IQ", 0, uid))

    def result(self) -> float:
        found = np.frombuffer(self.client.ask(GET, self.r + struct.pack("<QQ", 0, 32)), np.float32)
        assert len({*found.tolist()}) == 1
        return float(found[0])


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1)
    yield device
    device.close()


@pytest.fixture
def worker(device: CpuDevice) -> Iterator[Worker]:
    with running(device, protocol=8) as worker:
        yield worker


def test_graphs_run_again_by_name(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """More graphs than are kept ready: most are decoded again, with new inputs each time. A uid may be reused."""
    monkeypatch.setattr(graph_cache, "_READY", 2)
    with DescribedClient(worker) as client:
        assert client.hello[:3] == bytes([8, 0, 0])
        memory = client.alloc(1 << 16)
        all_ = [ScaledGraph(client, memory, 1024 * i, 2.0**i) for i in range(5)]
        for i, one in enumerate(all_, 1):
            one.write(1)
            one.compute(i)
        for value in (3.0, 5.0):
            for i, one in enumerate(all_, 1):
                one.write(value)
                one.again(i)
                assert one.result() == value * 2.0 ** (i - 1)
        all_[3].compute(1)
        all_[3].write(7)
        all_[3].again(1)
        assert all_[3].result() == 56


def test_a_graph_without_a_uid_does_not_run_again(worker: Worker) -> None:
    with DescribedClient(worker) as client:
        one = ScaledGraph(client, client.alloc(1024), 0, 2)
        one.write(1)
        one.compute(0)
        assert one.result() == 2
        one.again(0)
        assert client.closed()


def test_a_freed_buffer_drops_named_graphs(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready or packed; others stay."""
    monkeypatch.setattr(graph_cache, "_READY", 1)
    with DescribedClient(worker) as client:
        first, second = client.alloc(1024), client.alloc(1024)
        one, other = ScaledGraph(client, first, 0, 2), ScaledGraph(client, second, 0, 3)
        for uid, graph in ((1, one), (2, other)):
            graph.write(1)
            graph.compute(uid)
        client.tell(FREE, struct.pack("<Q", first[0]))
        other.again(2)
        assert other.result() == 3
        one.again(1)
        assert client.closed()


def test_all_names_are_forgotten_before_one_too_many(worker: Worker) -> None:
    with DescribedClient(worker) as client:
        one = ScaledGraph(client, client.alloc(1024), 0, 2)
        for uid in range(1, 1025):
            one.compute(uid)
        one.again(1)
        one.compute(1025)
        one.again(1025)
        assert not client.closed()
        one.again(1)
        assert client.closed()


def test_rows_of_a_tensor(worker: Worker) -> None:
    """Columns of a matrix, and rows that do not fit."""
    with DescribedClient(worker) as client:
        ptr, base = client.alloc(4096)
        matrix = np.arange(20 * 30, dtype=np.uint8).reshape(20, 30)
        whole = tensor(ptr, base, 600, type=24, width=1)
        client.tell(SET, whole + struct.pack("<BQ", 0, 0) + matrix.tobytes())
        new = np.random.default_rng(1).integers(0, 255, (20, 7), np.uint8)
        client.tell(SET_2D, whole + struct.pack("<QQQQ", 5, 7, 20, 30) + new.tobytes())
        matrix[:, 5:12] = new
        assert client.ask(GET, whole + struct.pack("<QQ", 0, 600)) == matrix.tobytes()
        assert client.ask(GET_2D, whole + struct.pack("<QQQQ", 30 + 4, 9, 19, 30)) == matrix[1:, 4:13].tobytes()
        client.tell(GET_2D, whole + struct.pack("<QQQQ", 24, 7, 20, 30))
        assert client.closed()


def test_a_client_that_hangs_up_gets_the_other_greeting(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """A client that sends more than HELLO keeps its version."""
    caplog.set_level(logging.INFO, "llamado.rpc.worker.server")
    DescribedClient(worker, major=7).sock.close()
    until(lambda: "next greeting is 7.0.0" in caplog.text)
    for _ in range(2):
        with DescribedClient(worker, major=7) as client:
            assert client.hello[0] == 7 and client.ask(COUNT) == struct.pack("<I", 1)
            client.tell(SET_2D, b"")
            assert client.closed()
    DescribedClient(worker, major=7).sock.close()  # one of several, and of no use
    until(lambda: worker.clients == 0)
    assert caplog.text.count("next greeting") == 1


def test_unknown_clients_are_greeted_as_before_b11450() -> None:
    (flag,) = (flag for flag in FLAGS if "--protocol" in flag.names)
    assert WorkerOptions().protocol == 7 and flag.default == "7"


def test_our_client_raises_the_version(device: CpuDevice) -> None:
    """The worker learns no version of ggml clients from it, whether it stays or leaves at once."""
    with running(device) as worker:
        (remote,) = connect(f"127.0.0.1:{worker.port}")
        assert remote._connection.protocol is wire.V8
        remote.close()
        assert greet(("127.0.0.1", worker.port), GUARD).phase is Phase.READY
        assert probe_hello("127.0.0.1", worker.port, GUARD).version == (7, 0, 0)
        until(lambda: worker.clients == 0)
        assert not worker.state.greetings._of


def test_an_invalid_upgrade_is_rejected() -> None:
    for requests in (
        [wire.Upgrade(8)],
        [wire.Hello(), wire.Upgrade(9)],
        [wire.Hello(), wire.DeviceCount(), wire.Upgrade(8)],
        [wire.Hello(), wire.Upgrade(8), wire.Upgrade(7)],
    ):
        reader = wire.RequestReader(protocol=wire.V7)
        reader.feed(b"".join(map(wire.write_request, requests)))
        with pytest.raises(wire.WireError, match="HELLO"):
            while reader.next() is not None:
                pass


def test_versions_of_clients_survive_a_restart(tmp_path: Path) -> None:
    """Only a client that went on has shown its version; addresses with the default need no entry."""
    file = tmp_path / "cache" / "clients.json"
    greetings = Greetings(wire.V7, file)
    greetings.record_refused("a", wire.V7, 0)
    assert not file.exists()
    greetings.record_accepted("a", wire.V8, 1)
    assert Greetings(wire.V7, file).of("a") is wire.V8
    greetings.record_refused("a", wire.V8, 100)
    greetings.record_accepted("a", wire.V7, 101)
    again = Greetings(wire.V7, file)
    assert again.of("a") is wire.V7 and file.read_text() == "{}"
    for damaged in ("", "[1]", '{"a": 99}', '{"a": [1]}'):
        file.write_text(damaged)
        assert Greetings(wire.V8, file).of("a") is wire.V8
    (tmp_path / "file").write_text("")
    Greetings(wire.V7, tmp_path / "file" / "x").record_accepted("a", wire.V8, 1)  # it cannot be written


def test_the_file_of_versions_is_written_rarely(tmp_path: Path) -> None:
    file = tmp_path / "clients.json"
    greetings = Greetings(wire.V7, file)
    greetings.record_accepted("a", wire.V8, 1)
    greetings.record_accepted("b", wire.V8, 2)
    assert file.read_text() == '{"a": 8}'
    greetings.record_accepted("b", wire.V8, 7)
    assert file.read_text() == '{"a": 8, "b": 8}'


def test_greetings_change_with_the_client() -> None:
    """Only another start of a program changes its version, and only for its own address."""
    greetings = Greetings(wire.V8)
    greetings.record_accepted("a", wire.V8, 100)
    greetings.record_accepted("a", wire.V8, 200)
    for opened in (95, 150, 205):
        greetings.record_refused("a", wire.V8, opened)
        assert greetings.of("a") is wire.V8
    greetings.record_refused("a", wire.V8, 215)
    assert (greetings.of("a"), greetings.of("b")) == (wire.V7, wire.V8)
    greetings.record_refused("a", wire.V8, 216)  # it came before that was known
    assert greetings.of("a") is wire.V7
    greetings.record_refused("a", wire.V7, 217)
    assert greetings.of("a") is wire.V8
    for i in range(2000):
        greetings.record_refused(f"c{i}", wire.V8, 0)
    assert greetings.of("c1999") is wire.V7 and greetings.of("c0") is wire.V8


@pytest.mark.interop
@pytest.mark.parametrize("protocol", [None, 8], ids=["as started", "greeted in the other version"])
def test_an_older_llama_cpp_gets_through(device: CpuDevice, peer_bin: Path, protocol: int | None) -> None:
    """At once with the worker's default; otherwise it ends once."""
    options = {} if protocol is None else {"protocol": protocol}
    with running(device, **{"protocol": WorkerOptions().protocol, **options}) as worker:
        said = [
            subprocess.run(
                [peer_bin / "llama-bench", "-rpc", f"127.0.0.1:{worker.port}", "--list-devices"],
                capture_output=True, text=True, timeout=60,
            ).stdout
            for _ in range(2)
        ]  # fmt: skip
    assert ["RPC0: 127.0.0.1" in one for one in said] == [protocol is None, True]


# --- two workers that add up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1000, 32768])
def test_two_workers_sum_a_tensor(worker: Worker, device: CpuDevice, n: int) -> None:
    """Each one's values plus the received ones: from 32,768 elements on as BF16."""
    given = [np.random.default_rng(seed).standard_normal(n).astype(np.float32) for seed in (1, 2)]
    port = free_port()
    with running(device, protocol=8) as other, DescribedClient(worker) as zero, DescribedClient(other) as one:
        sums, tensors = [], []
        for rank, client in enumerate((zero, one)):
            ptr, base = client.alloc(4 * n)
            tensors.append(tensor(ptr, base, n))
            client.tell(SET, tensors[rank] + struct.pack("<BQ", 0, 0) + given[rank].tobytes())
            host = b"" if rank == 0 else b"127.0.0.1"
            client.tell(COMM_INIT, struct.pack("<IIII64s", 0, rank, 2, port, host))
        for client in (zero, one):
            assert client.exactly(9) == struct.pack("<QB", 1, 1)
        for rank, client in enumerate((zero, one)):
            client.tell(COMM_ALLREDUCE, struct.pack("<I", 0) + tensors[rank])
        for rank, client in enumerate((zero, one)):
            found = client.ask(GET, tensors[rank] + struct.pack("<QQ", 0, 4 * n))
            sums.append(np.frombuffer(found, np.float32))
            client.tell(COMM_FREE, struct.pack("<I", 0))
    for rank, found in enumerate(sums):
        came = given[1 - rank]
        if n >= 32768:
            came = rounded(came)
        assert found.tobytes() == (given[rank] + came).tobytes()


def test_other_connections_do_not_block_the_other_rank(
    worker: Worker, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is silent, one hangs up, and one sends a byte of its greeting."""
    monkeypatch.setattr(comm, "_SECONDS", GUARD)
    monkeypatch.setattr(comm, "_GREETING_SECONDS", 0.05)
    port = free_port()

    def connected() -> socket.socket | None:
        with suppress(OSError):
            return socket.create_connection(("127.0.0.1", port))
        return None

    with (
        running(device, protocol=8) as other,
        DescribedClient(worker) as zero,
        DescribedClient(other) as one,
        ExitStack() as stack,
    ):
        zero.tell(COMM_INIT, struct.pack("<IIII64s", 0, 0, 2, port, b""))
        strangers = [stack.enter_context(until(connected)) for _ in range(3)]
        strangers[1].close()
        strangers[2].sendall(b"\0")
        one.tell(COMM_INIT, struct.pack("<IIII64s", 0, 1, 2, port, b"127.0.0.1"))
        for client in (zero, one):
            assert client.exactly(9) == struct.pack("<QB", 1, 1)


def rounded(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Round to eight bits of mantissa, by arithmetic alone."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent).astype(np.float32)


def test_bf16_of_nan() -> None:
    odd = np.array([0x7F800001, 0xFFFFFFFF, 0x7F800000, 0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    assert [hex(v) for v in bf16(odd).tolist()] == ["0x7fc0", "0xffff", "0x7f80", "0x3f80", "0x3f82"]


@pytest.mark.parametrize(
    "request_", [(0, 3, 0, b""), (0, 2, 80, b""), (1, 2, 0, b"127.0.0.1"), (0, 2, -1, b"")], ids=str
)
def test_an_unreachable_rank(
    worker: Worker, request_: tuple[int, int, int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many ranks, a system port, a closed port, no connection: the client gets 0 and goes on."""
    monkeypatch.setattr(comm, "_SECONDS", 0.1)
    monkeypatch.setattr(comm, "REFUSAL_SECONDS", 0.0)
    rank, world, port, host = request_
    with DescribedClient(worker) as client:
        port = free_port() if port < 0 else port
        assert client.ask(COMM_INIT, struct.pack("<IIII64s", 0, rank, world, port, host)) == b"\0"
        client.tell(COMM_ALLREDUCE, struct.pack("<I", 0) + tensor(*client.alloc(64), 16))
        assert client.closed()


# --- our client -------------------------------------------------------------------------------------------------------


@pytest.fixture
def described(device: CpuDevice) -> Iterator[tuple[Translator, RemoteDevice]]:
    """A worker of 8.0 that keeps graphs exactly as described, in front of one of 7.0."""
    with running(device) as worker, Translator(worker.port, newer=True) as stand_in:
        (remote,) = connect(f"127.0.0.1:{stand_in.port}")
        yield stand_in, remote
        remote.close()


def scaled(remote: RemoteDevice, n: int) -> tuple[Any, list[Graph]]:
    a, made = g.new_tensor(T.F32, 8, name="a"), []
    outputs = []
    for i in range(n):
        graph = Graph()
        outputs.append(graph.output("r", g.scale(a, float(i))))
        made.append(graph)
    remote.place([a, *outputs])
    return a, made


def result(remote: RemoteDevice, graph: Graph) -> float:
    return float(remote.read(graph.outputs["r"], 0, 32).result(GUARD).view(np.float32)[0])


def test_our_client_names_its_graphs(described: tuple[Translator, RemoteDevice]) -> None:
    """Two alternating graphs are sent once each, and again after a buffer was freed."""
    stand_in, remote = described
    a, made = scaled(remote, 3)
    for value in (1.0, 2.0, 3.0):
        remote.write(a, np.full(8, value, np.float32))
        for i, graph in enumerate(made):
            remote.submit(graph)
            assert result(remote, graph) == value * i
    assert (stand_in.seen[GRAPH_COMPUTE], stand_in.seen[GRAPH_RECOMPUTE]) == (3, 6)
    spare = g.new_tensor(T.F32, 8)
    remote.place([spare])[0].free()
    for graph in (*made, *made):
        remote.submit(graph)
    assert result(remote, made[2]) == 6
    assert (stand_in.seen[GRAPH_COMPUTE], stand_in.seen[GRAPH_RECOMPUTE]) == (6, 9)
    assert stand_in.refused == []


@pytest.mark.parametrize("protocol", [wire.V7, wire.V8], ids=str)
def test_our_client_counts_as_the_worker_does(protocol: wire.Protocol) -> None:
    """For any number of graphs and freed buffers, the client names only graphs that the worker has."""
    rng, most = np.random.default_rng(0), 1024 if protocol is wire.V8 else 1
    sent, kept, freed, named = SentGraphs(protocol), dict[int, bool](), 0, 0
    for uid in rng.integers(1, 1100 if most > 1 else 3, 20_000).tolist():
        if rng.random() < 0.0005:
            freed += 1
            kept.update(dict.fromkeys(kept, False))
        if sent.can_rerun(uid, freed):
            assert kept.get(uid)
            named += 1
            continue
        if len(kept) >= most:
            kept.clear()
        kept[uid] = True
    assert named > 5000


def test_a_worker_that_lost_a_graph_is_lost(described: tuple[Translator, RemoteDevice]) -> None:
    """The client names a graph that the worker does not have."""
    stand_in, remote = described
    _, made = scaled(remote, 1)
    remote.submit(made[0])
    remote._sent._usable.add(99)
    remote._prepared[id(made[0])] = remote._prepared[id(made[0])]._replace(uid=99)
    remote.submit(made[0])
    with pytest.raises(DeviceLost):
        result(remote, made[0])
    assert stand_in.refused == ["graph 99 of device 0 is not there"]
