"""What clients of one worker cannot take from each other: memory for computing, time, places."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

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
from llamado.rpc.worker.server import Worker

MIB = 1 << 20


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1)
    yield device
    device.close()


class Scaled:
    """r = 2a in a buffer of its own: a client as any other."""

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
        """Computes it once more with new numbers."""
        numbers = np.random.default_rng().normal(size=64).astype(np.float32)
        place = wire_of(self.a, self.ptr, self.base + self.places[self.a])
        self.client.send(wire.SetTensor(place, 0, 0, numbers.nbytes), numbers.tobytes())
        self.client.send(wire.GraphRecompute(0))
        got = self.client.get(wire_of(self.r, self.ptr, self.base + self.places[self.r]), 256)
        return got == (2 * numbers).tobytes()


class Summed:
    """The sum of 64 times the same MiB of ones: its graph wants 64 MiB of working memory."""

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
    """What a graph needs beyond its client's buffers is refused before it is taken."""
    with running(device, mem=48 * MIB) as worker, Client(worker) as client, Client(worker) as other:
        mine = Scaled(other)
        assert mine.is_right()
        before = free(worker)
        summed = Summed(client)
        summed.send()
        assert client.is_closed()
        until(lambda: free(worker) >= before)
        assert device.working_bytes < MIB
        assert mine.is_right()
    with running(device, mem=96 * MIB) as worker, Client(worker) as client:
        summed = Summed(client)
        summed.send()
        assert summed.result() == 16 * MIB
        assert free(worker) < 96 * MIB - 64 * MIB
        assert client.ask(wire.AllocBuffer(0, 40 * MIB)) == wire.AllocResponse(0, 0)
        assert client.alloc(16 * MIB)


@pytest.mark.parametrize("way", ["gone", "freed"])
def test_working_memory_is_given_back(device: CpuDevice, way: str) -> None:
    """With the client, or with its buffer, goes what only its graphs needed; the others' go on."""
    with running(device, mem=256 * MIB) as worker, Client(worker) as other, Client(worker) as client:
        mine = Scaled(other)
        assert mine.is_right()
        before, small = free(worker), resident()
        summed = Summed(client)
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


def test_working_memory_is_given_back_among_busy_clients(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the turn goes from one to the next and never is free."""
    runs, go = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    original, numbers = device.submit, iter(range(2))

    def slow(graph: Graph) -> None:
        number = next(numbers)
        runs[number].set()
        assert go[number].wait(GUARD)
        original(graph)

    with running(device, mem=256 * MIB) as worker, Client(worker) as one, Client(worker) as two, Client(worker) as gone:
        summed = Summed(gone)
        summed.send()
        assert summed.result() == 16 * MIB
        busy = [Scaled(one), Scaled(two)]
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


def test_working_memory_of_a_replaced_graph_is_given_back(device: CpuDevice) -> None:
    """Also of one that has left the session's memory of graphs and was only the last one."""
    with running(device, mem=256 * MIB) as worker, Client(worker) as client:
        mine = Scaled(client)
        assert mine.is_right()
        before = free(worker)
        summed = Summed(client)
        summed.send()
        assert summed.result() == 16 * MIB
        client.send(wire.FreeBuffer(summed.ptr))
        mine.send()
        assert mine.is_right()
        until(lambda: free(worker) >= before)


def test_working_memory_rests_with_its_client(device: CpuDevice) -> None:
    with running(device, mem=256 * MIB) as worker, Client(worker) as client:
        small = resident()
        summed = Summed(client)
        summed.send()
        assert summed.result() == 16 * MIB
        assert resident() > small + 48 * MIB
        (lender,) = worker.state.devices
        lender.rest(3600)
        assert resident() > small + 48 * MIB
        lender.rest(0)
        assert resident() < small + 16 * MIB
        client.send(wire.GraphRecompute(0))
        assert summed.result() == 16 * MIB


def test_a_device_says_what_it_needs_before_it_takes_it() -> None:
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
def test_the_work_of_a_client_that_hung_up_is_left_undone(device: CpuDevice) -> None:
    """Also that of one who still waits; and everything they had is free."""
    with running(device) as worker, Client(worker) as other:
        mine = Scaled(other)
        (lender,) = worker.state.devices
        before = lender.lent
        clients = [Client(worker) for _ in range(3)]
        for client in clients:
            Product(client)
        until(lambda: lender.lent > 3 * 128 * MIB)
        time.sleep(0.2)  # one of them computes
        for client in clients:
            client.sock.close()
        until(lambda: worker.clients == 1)
        until(lambda: lender.lent == before)
        assert mine.is_right()


@pytest.mark.slow
def test_an_operation_is_left_in_the_middle() -> None:
    """What the threads have in hand they finish, no more; the next graph is computed whole."""
    device = CpuDevice(2)
    w, x = g.new_tensor(T.F16, 4096, 4096, name="w"), g.new_tensor(T.F32, 4096, 2048, name="x")
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


def test_who_hung_up_while_waiting_never_computes(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, go = threading.Event(), threading.Event()
    submitted: list[Graph] = []
    original = device.submit

    def slow(graph: Graph) -> None:
        submitted.append(graph)
        runs.set()
        assert go.wait(60)
        original(graph)

    with running(device) as worker, Client(worker) as busy, Client(worker) as waiting:
        one, two = Scaled(busy), Scaled(waiting)
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


def test_memory_is_not_behind_turns(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gets memory, fills it and gives it back while another's graph runs."""
    runs, go = threading.Event(), threading.Event()
    original = device.submit

    def slow(graph: Graph) -> None:
        runs.set()
        assert go.wait(60)
        original(graph)

    with running(device, mem=64 * MIB) as worker, Client(worker) as busy, Client(worker, timeout=60) as other:
        mine = Scaled(busy)
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


def test_idle_connections_lock_nobody_out(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that has been idle for longest goes, of those that own nothing."""
    monkeypatch.setattr("llamado.rpc.worker.server._IDLE_SECONDS", -1.0)
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_CONNECTIONS", 8)
    with running(device) as worker, Client(worker) as owner:
        mine = Scaled(owner)
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


def test_who_has_memory_or_has_just_asked_is_not_let_go(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_CONNECTIONS", 2)
    with running(device) as worker, Client(worker) as one, Client(worker) as two:
        mine = Scaled(one)
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
    """Who floods a worker need not have been idle for long."""
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_CONNECTIONS", 8)
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_OF_A_NETWORK", 3)
    with running(device) as worker:
        flood = [Client(worker) for _ in range(8)]
        with Client(worker) as newcomer:
            assert newcomer.number(wire.DeviceCount()) == 1
        assert flood[0].is_closed()
        for client in flood:
            client.sock.close()


def test_one_network_does_not_get_all_places(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by owning something."""
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


@pytest.mark.slow
def test_a_dozen_short_connections_and_one_that_stays(device: CpuDevice) -> None:
    """What a llama-server does when it starts, four times on a worker that is nearly full."""
    with running(device) as worker:
        strangers = [Client(worker) for _ in range(90)]
        kept = []
        for _ in range(4):
            for _ in range(12):
                with Client(worker) as short:
                    assert short.number(wire.DeviceCount()) == 1
                    assert short.number(wire.GetAlignment(0)) == 64
            kept.append(Scaled(Client(worker)))
        assert all(one.is_right() for one in kept)
        for client in (*strangers, *(one.client for one in kept)):
            client.sock.close()
