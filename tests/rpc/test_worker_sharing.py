"""Fair sharing among the clients of one worker: working memory, time, places."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import GUARD, until
from wire_client import Client, layout, request, running, wire_of

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import DeviceError
from llamado.ggml import graph as g
from llamado.ggml.graph import Graph
from llamado.gguf.types import TensorType as T
from llamado.rpc import wire
from llamado.rpc.worker.server import Worker, WorkerOptions

MIB = 1 << 20


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1)
    yield device
    device.close()


class DoubledTensor:
    """r = 2a in its own buffer: a well-behaved client."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.a, self.graph = g.new_tensor(T.F32, 64, name="a"), Graph()
        self.r = self.graph.output("r", g.scale(self.a, 2.0))
        self.places, size = layout([self.a, self.r])
        self.ptr, self.base = client.alloc(size)
        self.send()

    def send(self) -> None:
        self.client.send(request(self.graph, self.ptr, self.base, self.places))

    def is_right(self, again: bool = True) -> bool:
        """Compute once more with new numbers and check the result."""
        numbers = np.random.default_rng().normal(size=64).astype(np.float32)
        place = wire_of(self.a, self.ptr, self.base + self.places[self.a])
        self.client.send(wire.SetTensor(place, 0, 0, numbers.nbytes), numbers.tobytes())
        self.client.send(wire.GraphRecompute(0))
        got = self.client.get(wire_of(self.r, self.ptr, self.base + self.places[self.r]), 256)
        return got == (2 * numbers).tobytes()


class LargeSum:
    """The sum of 64 times the same MiB of ones: its graph needs 64 MiB of working memory."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.row, self.graph = g.new_tensor(T.F32, MIB // 4, name="row"), Graph()
        self.sum = self.graph.output("sum", g.sum_all(g.view_2d(self.row, MIB // 4, 64, 0)))
        self.places, size = layout([self.row, self.sum])
        self.ptr, self.base = client.alloc(size)
        place = wire_of(self.row, self.ptr, self.base)
        client.send(wire.SetTensor(place, 0, 0, MIB), np.ones(MIB // 4, np.float32).tobytes())

    def send(self) -> None:
        self.client.send(request(self.graph, self.ptr, self.base, self.places))

    def result(self) -> float:
        got = self.client.get(wire_of(self.sum, self.ptr, self.base + self.places[self.sum]), 4)
        return float(np.frombuffer(got, np.float32)[0])


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def free(worker: Worker) -> int:
    return worker.state.devices[0].memory()[0]


# --- working memory ---------------------------------------------------------------------------------------------------


def test_working_memory_is_under_the_limit(device: CpuDevice) -> None:
    """Working memory beyond the limit is refused before it is allocated."""
    with running(device, mem=48 * MIB) as worker, Client(worker) as client, Client(worker) as other:
        mine = DoubledTensor(other)
        assert mine.is_right()
        before = free(worker)
        summed = LargeSum(client)
        summed.send()
        assert client.is_closed()
        until(lambda: free(worker) >= before)
        assert device.working_bytes < MIB
        assert mine.is_right()
    with running(device, mem=96 * MIB) as worker, Client(worker) as client:
        summed = LargeSum(client)
        summed.send()
        assert summed.result() == 16 * MIB
        assert free(worker) < 96 * MIB - 64 * MIB
        assert client.ask(wire.AllocBuffer(0, 40 * MIB)) == wire.AllocResponse(0, 0)
        assert client.alloc(16 * MIB)


@pytest.mark.parametrize("way", ["gone", "freed"])
def test_working_memory_is_released(device: CpuDevice, way: str) -> None:
    """It goes with the client or its buffer, if no other graph needs it."""
    with running(device, mem=256 * MIB) as worker, Client(worker) as other, Client(worker) as client:
        mine = DoubledTensor(other)
        assert mine.is_right()
        before, small = free(worker), resident()
        summed = LargeSum(client)
        summed.send()
        assert summed.result() == 16 * MIB
        assert free(worker) < before - 64 * MIB and resident() > small + 48 * MIB
        if way == "gone":
            client.sock.close()
        else:
            client.send(wire.FreeBuffer(summed.ptr))
            assert client.number(wire.DeviceCount()) == 1
        until(lambda: free(worker) >= before)
        assert resident() < small + 16 * MIB
        assert mine.is_right()


def test_working_memory_is_released_among_busy_clients(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is released even if turns pass from client to client without a pause."""
    runs, go = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    original, numbers = device.submit, iter(range(2))

    def slow(graph: Graph) -> None:
        number = next(numbers)
        runs[number].set()
        assert go[number].wait(GUARD)
        original(graph)

    with running(device, mem=256 * MIB) as worker, Client(worker) as one, Client(worker) as two, Client(worker) as gone:
        summed = LargeSum(gone)
        summed.send()
        assert summed.result() == 16 * MIB
        busy = [DoubledTensor(one), DoubledTensor(two)]
        assert all(client.is_right() for client in busy)
        before = free(worker)
        with monkeypatch.context() as patch:
            patch.setattr(device, "submit", slow)
            one.send(wire.GraphRecompute(0))
            assert runs[0].wait(GUARD)
            two.send(wire.GraphRecompute(0))
            until(lambda: len(worker.state.devices[0].turns._waiting) == 1)
            gone.sock.close()
            until(lambda: worker.clients == 2)
            assert free(worker) < before + 8 * MIB
            go[0].set()
            assert runs[1].wait(GUARD)
            until(lambda: free(worker) >= before + 64 * MIB)
            go[1].set()
        assert all(client.is_right() for client in busy)


def test_working_memory_of_a_replaced_graph_is_released(device: CpuDevice) -> None:
    """Memory is released even if the session's cache no longer has the graph."""
    with running(device, mem=256 * MIB) as worker, Client(worker) as client:
        mine = DoubledTensor(client)
        assert mine.is_right()
        before = free(worker)
        summed = LargeSum(client)
        summed.send()
        assert summed.result() == 16 * MIB
        client.send(wire.FreeBuffer(summed.ptr))
        mine.send()
        assert mine.is_right()
        until(lambda: free(worker) >= before)


def test_idle_working_memory_is_returned_to_the_system(device: CpuDevice) -> None:
    with running(device, mem=256 * MIB) as worker, Client(worker) as client:
        small = resident()
        summed = LargeSum(client)
        summed.send()
        assert summed.result() == 16 * MIB
        assert resident() > small + 48 * MIB
        (shared,) = worker.state.devices
        shared.trim_memory(3600)
        assert resident() > small + 48 * MIB
        shared.trim_memory(0)
        assert resident() < small + 16 * MIB
        client.send(wire.GraphRecompute(0))
        assert summed.result() == 16 * MIB


def test_a_device_reserves_memory_before_it_allocates_it() -> None:
    device = CpuDevice(2)
    asked: list[int] = []

    def refuse(size: int) -> None:
        asked.append(size)
        raise DeviceError("no")

    a = g.new_tensor(T.F32, 1 << 20, name="a")
    device.place([a])
    graph = Graph()
    graph.output("sum", g.sum_all(g.view_2d(a, 1 << 20, 16, 0)))
    device.place([*graph.outputs.values()])
    device.reserve = refuse
    with pytest.raises(DeviceError, match="no"):
        device.prepare(graph)
    assert asked[0] >= 64 * MIB and device.working_bytes == 0
    device.reserve = asked.append
    device.submit(graph)
    assert asked[1:] == [device.working_bytes] == asked[:1]
    device.submit(graph)
    assert len(asked) == 2
    device.drop_graphs([graph])
    assert device.working_bytes == 0
    device.close()


# --- time -------------------------------------------------------------------------------------------------------------


class Product:
    """256 times the same product of 2^37 multiplications: minutes of work."""

    def __init__(self, client: Client) -> None:
        w, x = g.new_tensor(T.Q4_0, 4096, 8192, name="w"), g.new_tensor(T.F32, 4096, 4096, name="x")
        graph = Graph()
        for _ in range(256):
            graph.expand(g.mul_mat(w, x))
        places, _ = layout([w, x, graph.nodes[0]])
        end = places[graph.nodes[0]]
        size = end + graph.nodes[0].nbytes
        places |= dict.fromkeys(graph.nodes, end)
        ptr, base = client.alloc(size)
        client.send(request(graph, ptr, base, places))


@pytest.mark.slow
def test_the_graph_of_a_lost_client_is_abandoned(device: CpuDevice) -> None:
    """The graph is abandoned even if it still waits for its turn, and all memory of the client is freed."""
    with running(device) as worker, Client(worker) as other:
        mine = DoubledTensor(other)
        (shared,) = worker.state.devices
        before = shared.allocated
        clients = [Client(worker) for _ in range(3)]
        for client in clients:
            Product(client)
        until(lambda: shared.allocated > 3 * 128 * MIB)
        time.sleep(0.2)  # one of them computes
        for client in clients:
            client.sock.close()
        until(lambda: worker.clients == 1)
        until(lambda: shared.allocated == before)
        assert mine.is_right()


@pytest.mark.slow
def test_an_operation_is_abandoned_in_the_middle() -> None:
    """Threads finish their current piece only; the next graph is computed as a whole."""
    device = CpuDevice(2)
    w, x = g.new_tensor(T.F16, 4096, 4096, name="w"), g.new_tensor(T.F32, 4096, 512, name="x")
    graph = Graph()
    y = graph.output("y", g.mul_mat(w, x))
    device.place([w, x, y])
    ones = np.ones(1 << 20, np.float16)
    for at in range(0, w.nbytes, ones.nbytes):
        device.write(w, ones, at)
    device.write(x, np.ones(x.nelements, np.float32))
    device.prepare(graph)
    thread = threading.Thread(target=device.submit, args=(graph,))
    thread.start()
    while thread.is_alive():
        device.abandon()
    thread.join()
    rows = device.read(y, 0, y.nbytes).result().view(np.float32)
    assert (rows == 0).any() and set(np.unique(rows)) <= {0, 4096}
    device.submit(graph)
    assert set(np.unique(device.read(y, 0, y.nbytes).result().view(np.float32))) == {4096}
    device.close()


def test_a_client_lost_while_waiting_never_computes(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, go = threading.Event(), threading.Event()
    submitted: list[Graph] = []
    original = device.submit

    def slow(graph: Graph) -> None:
        submitted.append(graph)
        runs.set()
        assert go.wait(60)
        original(graph)

    with running(device) as worker, Client(worker) as busy, Client(worker) as waiting:
        one, two = DoubledTensor(busy), DoubledTensor(waiting)
        busy.get(wire_of(one.r, one.ptr, one.base + one.places[one.r]), 4)
        waiting.get(wire_of(two.r, two.ptr, two.base + two.places[two.r]), 4)
        monkeypatch.setattr(device, "submit", slow)
        busy.send(wire.GraphRecompute(0))
        assert runs.wait(60)
        waiting.send(wire.GraphRecompute(0))
        waiting.sock.close()
        until(lambda: worker.clients == 1 or any(session.is_gone for session in [*worker._sessions]))
        go.set()
        until(lambda: worker.clients == 1)
        assert one.is_right()
        assert len(submitted) == 2


def test_memory_needs_no_turn(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client allocates, fills and frees memory while another client's graph runs."""
    runs, go = threading.Event(), threading.Event()
    original = device.submit

    def slow(graph: Graph) -> None:
        runs.set()
        assert go.wait(60)
        original(graph)

    with running(device, mem=64 * MIB) as worker, Client(worker) as busy, Client(worker, timeout=60) as other:
        mine = DoubledTensor(busy)
        busy.get(wire_of(mine.r, mine.ptr, mine.base + mine.places[mine.r]), 4)
        monkeypatch.setattr(device, "submit", slow)
        busy.send(wire.GraphRecompute(0))
        assert runs.wait(60)
        try:
            before = free(worker)
            ptr, _ = other.alloc(1 << 20)
            assert free(worker) < before
            other.send(wire.FreeBuffer(ptr))
            assert other.number(wire.DeviceCount()) == 1
            assert free(worker) >= before
        finally:
            go.set()
        assert mine.is_right()


def test_too_much_work_for_one_graph(device: CpuDevice) -> None:
    """Six products that would take a fast machine hours."""
    with running(device) as worker, Client(worker) as client:
        w, x = g.new_tensor(T.Q4_0, 4096, 8192, name="w"), g.new_tensor(T.F32, 4096, 4096, name="x")
        graph = Graph()
        for _ in range(1024):
            graph.expand(g.mul_mat(w, x))
        places, end = layout([w, x])
        size = end + graph.nodes[0].nbytes
        places |= dict.fromkeys(graph.nodes, end)
        ptr, base = client.alloc(size)
        client.send(request(graph, ptr, base, places))
        assert client.is_closed()


# --- places -----------------------------------------------------------------------------------------------------------


def test_idle_connections_are_evicted(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest idle one goes first, of those without buffers."""
    monkeypatch.setattr("llamado.rpc.worker.server._IDLE_SECONDS", -1.0)
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_CONNECTIONS", 8)
    with running(device) as worker, Client(worker) as owner:
        mine = DoubledTensor(owner)
        assert mine.is_right()
        idle = [Client(worker) for _ in range(7)]
        assert idle[0].number(wire.DeviceCount()) == 1
        for newest in range(2):
            with Client(worker) as newcomer:
                assert newcomer.number(wire.DeviceCount()) == 1
            assert idle[newest + 1].is_closed()
            until(lambda: worker.clients == 7)
            idle.append(Client(worker))
        assert idle[0].number(wire.DeviceCount()) == 1
        assert mine.is_right()
        for client in idle:
            client.sock.close()


def test_active_clients_and_those_with_buffers_are_not_evicted(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_CONNECTIONS", 2)
    with running(device) as worker, Client(worker) as one, Client(worker) as two:
        mine = DoubledTensor(one)
        with Client(worker, greet=False, timeout=GUARD) as three:
            assert three.is_closed()
        assert two.number(wire.DeviceCount()) == 1
        monkeypatch.setattr("llamado.rpc.worker.server._IDLE_SECONDS", -1.0)
        ptr, _ = two.alloc(1)
        with Client(worker, greet=False, timeout=GUARD) as three:
            assert three.is_closed()
        two.send(wire.FreeBuffer(ptr))
        assert two.number(wire.DeviceCount()) == 1
        with Client(worker) as three:
            assert three.number(wire.DeviceCount()) == 1
        assert two.is_closed() and mine.is_right()


def test_a_network_with_more_than_its_share_loses_places_at_once(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections need not be idle for long."""
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_CONNECTIONS", 8)
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_OF_A_NETWORK", 3)
    with running(device) as worker:
        flood = [Client(worker) for _ in range(8)]
        with Client(worker) as newcomer:
            assert newcomer.number(wire.DeviceCount()) == 1
        assert flood[0].is_closed()
        for client in flood:
            client.sock.close()


@pytest.mark.parametrize(
    ("present", "network", "expected"),
    [
        ("", "a", True),
        ("a a a a a", "a", True),  # more than its share, while a quarter of the places is free
        ("a a a b b b", "a", False),
        ("a a b b b b", "a", True),
        ("a a a:old b b b", "a", 2),
        ("a a a b b b:old", "a", False),  # not a place of another network
        ("a b c d e f g h", "z", False),
        ("a b c d e f g h:old", "z", 7),
        ("a b c d e:old f g:old h", "z", 4),  # the one that is idle for the longest time
        ("a:old c c b:old b:old b d e", "z", 3),  # of the network with the most connections
        ("a a a a:new b c d e", "z", 3),
        ("a a a:new b c d e f", "z", False),
        ("a b c d e f g h:gone", "z", True),
    ],
)
def test_which_connection_makes_room(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, present: str, network: str, expected: bool | int
) -> None:
    """`old`: idle for a long time; `new`: idle for a moment; `gone`: it made room for another."""
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_CONNECTIONS", 8)
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_OF_A_NETWORK", 3)
    closed: list[int] = []
    worker = Worker([device], WorkerOptions(port=0))
    for number, (name, _, state) in enumerate(one.partition(":") for one in present.split()):
        since = {"old": number - 1e9, "new": time.monotonic()}.get(state)
        session: Any = ConnectedClient(name, str(number), since, partial(closed.append, number))
        worker._sessions[session] = threading.current_thread()
        if state == "gone":
            worker._evicted.add(session)
    has_room = worker._has_room(network)
    worker._sessions.clear()
    worker._end()
    assert (has_room, closed) == (expected is not False, [expected] if not isinstance(expected, bool) else [])


@dataclass(eq=False)
class ConnectedClient:
    """A session, as the worker sees it when another client comes."""

    network: str
    name: str
    idle_since: float | None
    shut: Callable[[], None]


def test_one_network_does_not_get_all_places(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of one network are limited even if they hold buffers."""
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_CONNECTIONS", 8)
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_OF_A_NETWORK", 3)
    network = "a"
    for module in ("server", "client"):
        monkeypatch.setattr(f"llamado.rpc.worker.{module}.identity", lambda *_: network)
    with running(device) as worker:
        many = [Client(worker) for _ in range(6)]
        for client in many:
            client.alloc(1)
        with Client(worker, greet=False, timeout=GUARD) as one_more:
            assert one_more.is_closed()
        network = "b"
        others = [Client(worker) for _ in range(2)]
        assert [client.number(wire.DeviceCount()) for client in others] == [1, 1]
        with Client(worker, greet=False, timeout=GUARD) as one_more:
            assert one_more.is_closed()
        many[0].sock.close()
        until(lambda: worker.clients == 7)
        with Client(worker) as one_more:
            assert one_more.number(wire.DeviceCount()) == 1
        for client in (*many, *others):
            client.sock.close()


def test_a_network_with_its_share_gets_no_idle_place_of_another(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamado.rpc.worker.server._IDLE_SECONDS", -1.0)
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_CONNECTIONS", 8)
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_OF_A_NETWORK", 3)
    network = "b"
    for module in ("server", "client"):
        monkeypatch.setattr(f"llamado.rpc.worker.{module}.identity", lambda *_: network)
    with running(device) as worker, Client(worker) as idle:
        network = "a"
        many = [Client(worker) for _ in range(5)]
        for client in many:
            client.alloc(1)
        with Client(worker, greet=False, timeout=GUARD) as one_more:
            assert one_more.is_closed()
        assert idle.number(wire.DeviceCount()) == 1
        for client in many:
            client.sock.close()


@pytest.mark.slow
def test_a_dozen_short_connections_and_one_that_stays(device: CpuDevice) -> None:
    """llama-server connects like this when it starts; here it does so four times on a nearly full worker."""
    with running(device) as worker:
        strangers = [Client(worker) for _ in range(90)]
        kept = []
        for _ in range(4):
            for _ in range(12):
                with Client(worker) as short:
                    assert short.number(wire.DeviceCount()) == 1
                    assert short.number(wire.GetAlignment(0)) == 64
            kept.append(DoubledTensor(Client(worker)))
        assert all(one.is_right() for one in kept)
        for client in (*strangers, *(one.client for one in kept)):
            client.sock.close()
