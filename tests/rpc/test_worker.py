"""The worker, driven byte by byte: responses, memory, graphs, limits, and isolation of clients."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from ports import free_port
from stand_in_cards import Cards, install
from test_endpoint import Authority
from tiers import first_of
from translator import Translator
from waiting import GUARD, until
from wire_client import Client, layout, raw, records, request, running, wire_of

from llamado.devices import limits
from llamado.devices.accelerators import Accelerators
from llamado.devices.compile.compiler import Compiler
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.device import DeviceError
from llamado.ggml import graph as g
from llamado.ggml.graph import Graph
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType as T
from llamado.rpc import wire
from llamado.rpc.endpoint import Endpoint, EndpointError, client_tls
from llamado.rpc.hashing import fnv1a
from llamado.rpc.worker import server
from llamado.rpc.worker.budgets import Budgets
from llamado.rpc.worker.connection import ClientConnection
from llamado.rpc.worker.identity import identity
from llamado.rpc.worker.memory import SharedDevice, Turns
from llamado.rpc.worker.server import Worker, WorkerError, WorkerOptions, run_worker

GENUINE = hashlib.sha512(b"genuine").digest() * 64
FORGED = (b"forged 1 " + bytes(4096))[:4076] + bytes.fromhex("02021909050400000306050305001e03053e0201")
"""Other bytes with the same FNV-1a: a hash is a sum of small numbers times powers of its prime, and a reduced basis of
the sums that are 0 gives twenty bytes that make up any difference.
"""

NOTHING = wire.WireTensor(0, 0, 0, (0,) * 4, (0,) * 4, 0)


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1)
    yield device
    device.close()


@pytest.fixture
def worker(device: CpuDevice) -> Iterator[Worker]:
    with running(device) as worker:
        yield worker


@pytest.fixture
def client(worker: Worker) -> Iterator[Client]:
    with Client(worker) as client:
        yield client


@pytest.fixture
def cached(
    device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], AbstractContextManager[Worker]]:
    """Return a function that starts a worker with a cache in `tmp_path`."""
    monkeypatch.setattr("llamado.rpc.worker.server.cache_folder", lambda: tmp_path / "rpc")
    return lambda: running(device, cache=True)


class Sum:
    """r = a + b on a worker, in its own buffer."""

    def __init__(self, client: Client, n: int = 64) -> None:
        self.client = client
        self.a, self.b = g.new_tensor(T.F32, n, 4, name="a"), g.new_tensor(T.F32, n, 4, name="b")
        self.graph = Graph()
        self.r = self.graph.output("r", g.add(self.a, self.b, name="r"))
        self.places, size = layout([self.a, self.b, self.r])
        self.ptr, self.base = client.alloc(size)

    def wire(self, tensor: Tensor) -> wire.WireTensor:
        return wire_of(tensor, self.ptr, self.base + self.places[tensor])

    def write(self, a: float, b: float) -> None:
        for tensor, value in ((self.a, a), (self.b, b)):
            self.client.set(self.wire(tensor), np.full(tensor.nelements, value, np.float32).tobytes())

    def compute(self) -> None:
        self.client.send(request(self.graph, self.ptr, self.base, self.places))

    def result(self) -> set[float]:
        return set(np.frombuffer(self.client.get(self.wire(self.r), self.r.nbytes), np.float32).tolist())


# --- answers ----------------------------------------------------------------------------------------------------------


def test_greeting(client: Client) -> None:
    assert client.hello == wire.HelloResponse(7, 0, 0, features=0x5D)
    assert client.number(wire.DeviceCount()) == 1
    assert client.number(wire.GetAlignment(0)) == 64
    assert client.number(wire.GetMaxSize(0)) == 2**64 - 1


def test_requests_may_arrive_byte_by_byte(worker: Worker) -> None:
    with Client(worker, greet=False) as client:
        client.reader.expect(14)  # type: ignore[arg-type]
        for byte in wire.write_request(wire.Hello()):
            client.sock.sendall(bytes([byte]))
        while client.reader.next() is None:
            client.reader.feed(client.sock.recv(100))
        ptr, base = client.alloc(300)
        data = bytes(range(256))
        for byte in wire.write_request(wire.SetTensor(raw(ptr, base, 300), 0, 10, 256)) + data:
            client.sock.sendall(bytes([byte]))
        assert client.get(raw(ptr, base, 300), 300) == bytes(10) + data + bytes(34)


def test_many_requests_in_one_packet(client: Client) -> None:
    ptr, base = client.alloc(1000)
    pieces = b"".join(
        wire.write_request(wire.SetTensor(raw(ptr, base, 1000), 0, i, 1)) + bytes([i % 256]) for i in range(1000)
    )
    client.sock.sendall(pieces)
    assert client.get(raw(ptr, base, 1000), 1000) == bytes(i % 256 for i in range(1000))


def test_megabytes_of_data(client: Client) -> None:
    data = np.random.default_rng(0).integers(0, 256, 9_000_001, np.uint8).tobytes()
    ptr, base = client.alloc(len(data) + 7)
    tensor = raw(ptr, base + 7, len(data))
    client.set(tensor, data)
    assert client.get(tensor, len(data)) == data
    assert client.get(tensor, 1000, 8_999_001) == data[-1000:]


def test_buffers_start_as_zeros(client: Client) -> None:
    first, base = client.alloc(5000)
    client.set(raw(first, base, 5000), b"\xff" * 5000)
    client.send(wire.FreeBuffer(first))
    second, base = client.alloc(5000)
    assert client.get(raw(second, base, 5000), 5000) == bytes(5000)


def test_bases_of_buffers_are_disjoint(client: Client) -> None:
    """ggml does arithmetic on them: base + offset must name one buffer."""
    found = [client.alloc(size) for size in (1, 4096, 100_000, 0, 7)]
    ends = [base + size for (_, base), size in zip(found, (1, 4096, 100_000, 0, 7), strict=True)]
    bases = [base for _, base in found]
    assert bases == sorted(bases) and all(end < base for end, base in zip(ends, bases[1:], strict=False))
    assert all(base % 4096 == 0 and base >= 4096 for base in bases)
    assert len({ptr for ptr, _ in found} | {0}) == 6


def test_clear_memset_copy_init(client: Client) -> None:
    ptr, base = client.alloc(100)
    whole = raw(ptr, base, 100)
    client.send(wire.BufferClear(ptr, 7))
    client.send(wire.MemsetTensor(raw(ptr, base + 10, 20), 5, 10, 9))
    client.send(wire.InitTensor(whole))
    expected = bytearray(b"\x07" * 100)
    expected[15:25] = b"\x09" * 10
    assert client.get(whole, 100) == expected
    assert client.number(wire.CopyTensor(raw(ptr, base + 10, 30), raw(ptr, base + 20, 30))) == 1  # overlapping
    expected[20:50] = bytes(expected)[10:40]
    assert client.get(whole, 100) == expected
    other, there = client.alloc(50)
    assert client.number(wire.CopyTensor(raw(ptr, base + 15, 40), raw(other, there + 3, 40))) == 1
    assert client.get(raw(other, there, 50), 50) == bytes(3) + expected[15:55] + bytes(7)


def test_alloc_size(client: Client) -> None:
    """The size is that of the tensor's bytes, as on ggml's CPU."""
    tensor = wire.WireTensor(1, int(T.Q4_1), 0, (576, 10, 1, 1), (20, 360, 3600, 3600), 0)
    assert client.number(wire.GetAllocSize(0, tensor, (NOTHING,) * 10)) == 3600


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_compute_and_compute_again(client: Client) -> None:
    sum = Sum(client)
    sum.write(1, 2)
    sum.compute()
    assert sum.result() == {3}
    sum.write(10, 2)
    client.send(wire.GraphRecompute(0))
    assert sum.result() == {12}


def test_equal_graphs_are_compiled_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that alternates between shapes does not cause new compilations."""
    compiled = []
    original = Compiler.compile
    monkeypatch.setattr(Compiler, "compile", lambda self: compiled.append(self) or original(self))
    one, two = Sum(client), Sum(client, 128)
    for i in range(4):
        for sum in (one, two):
            sum.write(i, 1)
            sum.compute()
            assert sum.result() == {i + 1}
    assert len(compiled) == 2


def test_activations_without_a_place(client: Client) -> None:
    a, r = g.new_tensor(T.F32, 64, name="a"), Graph()
    x = a
    for _ in range(5):
        x = g.rms_norm(g.scale(x, 3.0), 1e-6)
    r.output("x", x)
    places, size = layout([a, x])
    ptr, base = client.alloc(size)
    client.set(wire_of(a, ptr, base + places[a]), np.full(64, 2, np.float32).tobytes())
    client.send(request(r, ptr, base, places))
    got = np.frombuffer(client.get(wire_of(x, ptr, base + places[x]), x.nbytes), np.float32)
    np.testing.assert_allclose(got, 1, rtol=1e-5)


class Rotation:
    """A rotation. In a model its positions and factors never change, so a device might take them for constants.

    All tensors have their own buffers.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.x, self.at, self.factors = g.new_tensor(T.F32, 64, 1, 2), g.new_tensor(T.I32, 2), g.new_tensor(T.F32, 32)
        self.graph = Graph()
        turned = g.rope_ext(self.x, self.at, self.factors, 64, 0, 0, 1e4, 1.0, 0.0, 1.0, 0.0, 0.0)
        self.r = self.graph.output("r", turned)
        self.buffers = {t: client.alloc(t.nbytes) for t in (self.x, self.at, self.factors, self.r)}
        self.put(self.x, np.linspace(-1, 1, 128, dtype=np.float32))
        self.put(self.at, np.array([3, 4], np.int32))
        self.put(self.factors, np.ones(32, np.float32))

    def wire(self, tensor: Tensor) -> wire.WireTensor:
        return wire_of(tensor, *self.buffers[tensor])

    def put(self, tensor: Tensor, numbers: NDArray[Any]) -> None:
        self.client.set(self.wire(tensor), numbers.tobytes())

    def compute(self) -> None:
        nodes, made = records(self.graph, 0, 0, dict.fromkeys(self.buffers, 0))
        for record, (ptr, base) in zip(made, self.placed(made), strict=True):
            record["buffer"], record["data"] = ptr, base
        self.client.send(wire.graph_request(0, nodes, made))

    def placed(self, made: NDArray[Any]) -> list[tuple[int, int]]:
        by_shape = {(int(t.type), tuple(t.ne), int(t.op)): place for t, place in self.buffers.items()}
        return [by_shape[int(r["type"]), tuple(r["ne"].tolist()), int(r["op"])] for r in made]

    def result(self) -> bytes:
        return self.client.get(self.wire(self.r), self.r.nbytes)


CHANGES = {
    "set": lambda one, tensor, byte: one.client.set(one.wire(tensor), bytes([byte]) * tensor.nbytes),
    "clear": lambda one, tensor, byte: one.client.send(wire.BufferClear(one.buffers[tensor][0], byte)),
    "memset": lambda one, tensor, byte: one.client.send(wire.MemsetTensor(one.wire(tensor), 0, tensor.nbytes, byte)),
    "copy": lambda one, tensor, byte: copied(one, tensor, byte),
    "hash": lambda one, tensor, byte: hashed(one, tensor, byte),
}


def copied(one: Rotation, tensor: Tensor, byte: int) -> None:
    ptr, base = one.client.alloc(tensor.nbytes)
    one.client.send(wire.BufferClear(ptr, byte))
    one.client.ask(wire.CopyTensor(wire_of(tensor, ptr, base), one.wire(tensor)))


def hashed(one: Rotation, tensor: Tensor, byte: int) -> None:
    data = np.full(tensor.nbytes, byte, np.uint8)
    ptr, base = one.client.alloc(tensor.nbytes)
    one.client.set(wire_of(tensor, ptr, base), data.tobytes(), cache=1)
    until(lambda: one.client.number(wire.SetTensorHash(one.wire(tensor), 0, fnv1a(data))) == 1)


@pytest.mark.parametrize("way", CHANGES)
@pytest.mark.parametrize("what", ["factors", "at"])
def test_changed_inputs_count_in_the_next_run(
    cached: Callable[[], AbstractContextManager[Worker]], way: str, what: str
) -> None:
    """The graph is sent again or named; the result equals that of a client that had the input from the start."""
    with cached() as worker, Client(worker) as client, Client(worker) as other:
        one = Rotation(client)
        for byte, again in ((0x3E, False), (0x3F, True), (0x01, False)):
            one.compute()
            before = one.result()
            tensor = getattr(one, what)
            CHANGES[way](one, tensor, byte)
            if again:
                client.send(wire.GraphRecompute(0))
            else:
                one.compute()
            fresh = Rotation(other)
            fresh.put(getattr(fresh, what), np.full(tensor.nbytes, byte, np.uint8))
            fresh.compute()
            assert one.result() == fresh.result() != before


@pytest.mark.parametrize("freed", ["x", "at", "factors", "r"])
def test_a_freed_buffer_drops_its_graphs(
    client: Client, device: CpuDevice, freed: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The graph cannot be run again by its name or its bytes. Other graphs stay."""
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"):
        sum, one = Sum(client), Rotation(client)
        sum.write(1, 2)
        sum.compute()
        one.compute()
        one.result()
        client.send(wire.FreeBuffer(one.buffers[getattr(one, freed)][0]))
        assert client.number(wire.DeviceCount()) == 1
        submitted: list[Graph] = []
        patch.setattr(device, "submit", submitted.append)
        sum.compute()
        assert client.number(wire.DeviceCount()) == 1 == len(submitted)
        if freed in "xr":
            one.compute()
            assert "is not one of this connection's" in refused(caplog, client)
    assert len(submitted) == 1


def test_the_last_graph_is_forgotten_with_its_memory(
    client: Client, device: CpuDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"):
        sum, spare = Sum(client), client.alloc(100)
        sum.write(1, 2)
        sum.compute()
        assert sum.result() == {3}
        client.send(wire.FreeBuffer(spare[0]))
        client.send(wire.GraphRecompute(0))
        assert sum.result() == {3}
        submitted: list[Graph] = []
        monkeypatch.setattr(device, "submit", submitted.append)
        client.send(wire.FreeBuffer(sum.ptr))
        client.send(wire.GraphRecompute(0))
        assert "GRAPH_RECOMPUTE without a graph" in refused(caplog, client)
        assert submitted == []


def test_a_client_that_replaces_its_buffers(client: Client) -> None:
    """llama.cpp replaces its buffers when its context grows."""
    for i in range(3):
        sum = Sum(client)
        sum.write(i, 2)
        sum.compute()
        assert sum.result() == {i + 2}
        client.send(wire.FreeBuffer(sum.ptr))


def test_clients_take_turns() -> None:
    """First come, first served."""
    turns, order = Turns(), []
    threads = []

    def wait(i: int) -> None:
        with turns:
            order.append(i)

    with turns:
        for i in range(20):
            thread = threading.Thread(target=wait, args=(i,))
            thread.start()
            threads.append(thread)
            until(lambda i=i: len(turns._waiting) == i + 1)  # type: ignore[misc]
    for thread in threads:
        thread.join(GUARD)
    assert order == list(range(20))
    with turns:
        pass


def test_requests_are_served_while_another_client_computes(
    worker: Worker, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second connection carries the first one's heartbeats."""
    runs, go = threading.Event(), threading.Event()
    original = device.submit

    def slow(graph: Graph) -> None:
        runs.set()
        assert go.wait(60)
        original(graph)

    monkeypatch.setattr(device, "submit", slow)
    with Client(worker) as busy, Client(worker) as other:
        sum = Sum(busy)
        sum.write(1, 1)
        mine = Sum(other)
        sum.compute()
        assert runs.wait(60)
        assert other.number(wire.DeviceCount()) == 1
        mine.write(5, 5)
        assert isinstance(other.ask(wire.GetDeviceMemory(0)), wire.DeviceMemory)
        assert other.get(mine.wire(mine.a), 4) == np.float32(5).tobytes()
        go.set()
        assert sum.result() == {2}


def test_many_clients_at_once(worker: Worker) -> None:
    """Each client reads only its own bytes."""
    failures: list[str] = []

    def work(i: int) -> None:
        try:
            with Client(worker) as client:
                sum = Sum(client)
                for k in range(25):
                    sum.write(100 * i, k)
                    sum.compute() if k % 3 == 0 else client.send(wire.GraphRecompute(0))
                    if (got := sum.result()) != {100 * i + k}:
                        failures.append(f"client {i}, round {k}: {got}")
        except Exception as error:
            failures.append(f"client {i}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    until(lambda: worker.clients == 0)


# --- memory -----------------------------------------------------------------------------------------------------------


def allocated(worker: Worker) -> int:
    return worker.state.devices[0].allocated


def test_memory_limit_counts_all_clients(device: CpuDevice) -> None:
    with running(device, mem=10 << 20) as worker, Client(worker) as one, Client(worker) as two:
        assert one.ask(wire.GetDeviceMemory(0)) == wire.DeviceMemory(10 << 20, 10 << 20)
        ptr, base = one.alloc(6 << 20)
        assert two.ask(wire.GetDeviceMemory(0)) == wire.DeviceMemory(4 << 20, 10 << 20)
        assert two.ask(wire.AllocBuffer(0, 5 << 20)) == wire.AllocResponse(0, 0)
        two.alloc(4 << 20)
        assert two.ask(wire.AllocBuffer(0, 1)) == wire.AllocResponse(0, 0)
        assert one.get(raw(ptr, base, 8), 8) == bytes(8)
        one.send(wire.FreeBuffer(ptr))
        assert one.number(wire.DeviceCount()) == 1
        two.alloc(6 << 20)


@pytest.mark.parametrize("size", [2**64 - 1, 2**63, 2**62, 1 << 50])
def test_impossible_sizes(client: Client, size: int) -> None:
    assert client.ask(wire.AllocBuffer(0, size)) == wire.AllocResponse(0, 0)
    client.alloc(1)


def test_tiny_buffers_cost_pages(device: CpuDevice) -> None:
    with running(device, mem=4 * 4096) as worker, Client(worker) as client:
        for _ in range(4):
            client.alloc(0)
        assert client.ask(wire.AllocBuffer(0, 0)) == wire.AllocResponse(0, 0)


def test_the_number_of_buffers_is_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.rpc.worker.handlers.buffers.MAX_BUFFERS", 3)
    for _ in range(3):
        client.alloc(1)
    assert client.ask(wire.AllocBuffer(0, 1)) == wire.AllocResponse(0, 0)


def test_a_lost_client_frees_its_memory(worker: Worker) -> None:
    before = allocated(worker)
    client = Client(worker)
    client.alloc(1 << 20)
    assert allocated(worker) == before + (1 << 20)
    client.sock.close()
    until(lambda: allocated(worker) == before)


def test_a_client_lost_in_the_middle_of_a_tensor_frees_its_memory(worker: Worker) -> None:
    before = allocated(worker)
    cut = Client(worker)
    ptr, base = cut.alloc(1 << 20)
    cut.sock.sendall(wire.write_request(wire.SetTensor(raw(ptr, base, 1 << 20), 0, 0, 1 << 20)) + b"x" * 1000)
    cut.sock.close()
    until(lambda: allocated(worker) == before)
    reset = Client(worker)
    reset.alloc(1 << 20)
    reset.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    reset.sock.close()
    until(lambda: allocated(worker) == before)


def test_memory_of_lost_clients_is_returned_to_the_system(worker: Worker, device: CpuDevice) -> None:
    """The pages themselves are returned: cached code must not keep them."""
    client = Client(worker)
    sum = Sum(client)
    sum.compute()
    ptr, _ = client.alloc(64 << 20)
    client.send(wire.BufferClear(ptr, 1))
    assert client.number(wire.DeviceCount()) == 1

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    full = resident()
    client.sock.close()
    until(lambda: resident() < full - (48 << 20))


def test_activations_count_against_the_limit(device: CpuDevice) -> None:
    """Results without a place need memory on the device."""
    a, graph = g.new_tensor(T.F32, 1 << 20, name="a"), Graph()
    r = graph.output("r", g.scale(g.view_1d(g.add(a, a), 64), 2.0))
    places, size = layout([a, r])
    for mem, fits in ((size + (1 << 20), False), (size + (9 << 20), True)):
        with running(device, mem=mem) as worker, Client(worker) as client:
            ptr, base = client.alloc(size)
            client.send(request(graph, ptr, base, places))
            if fits:
                client.get(wire_of(r, ptr, base + places[r]), r.nbytes)
            else:
                assert client.is_closed()


def test_a_device_whose_memory_is_out_of_reach(device: CpuDevice) -> None:
    """Its buffers are accessed only through the Device contract."""

    class Far:
        name = "far"

        def __init__(self) -> None:
            self.data: dict[int, bytearray] = {}

        def memory(self) -> tuple[int, int]:
            return 1 << 30, 1 << 30

        def place(self, tensors: list[Tensor]) -> list[object]:
            class Buffer:
                size, memory = tensors[0].nbytes, None

                def free(self) -> None:
                    pass

            tensors[0].buffer = buffer = Buffer()
            self.data[id(buffer)] = bytearray(buffer.size)
            return [buffer]

        def write(self, tensor: Tensor, data: np.ndarray, offset: int = 0) -> None:  # type: ignore[type-arg]
            start = tensor.offset + offset
            self.data[id(tensor.buffer)][start : start + len(data)] = data.tobytes()

        def read(self, tensor: Tensor, offset: int, size: int) -> object:
            from concurrent.futures import Future

            start = tensor.offset + offset
            future: Future[object] = Future()
            future.set_result(np.frombuffer(bytes(self.data[id(tensor.buffer)][start : start + size]), np.uint8))
            return future

        def copy(self, source: Tensor, target: Tensor) -> None:
            self.write(target, self.read(source, 0, source.nbytes).result())  # type: ignore[attr-defined]

    with running(device, Far()) as worker, Client(worker) as client:  # type: ignore[arg-type]
        assert client.number(wire.DeviceCount()) == 2
        far, base = client.alloc(5 << 20, device=1)
        data = np.random.default_rng(0).integers(0, 256, 5 << 20, np.uint8).tobytes()
        client.set(raw(far, base, 5 << 20), data)
        assert client.get(raw(far, base, 5 << 20), 5 << 20) == data
        near, there = client.alloc(1000)
        assert client.number(wire.CopyTensor(raw(far, base + 5, 900), raw(near, there, 900))) == 1
        assert client.number(wire.CopyTensor(raw(near, there, 900), raw(far, base + 2000, 900))) == 1
        assert client.number(wire.CopyTensor(raw(far, base, 100), raw(far, base + 3000, 100))) == 1
        client.send(wire.MemsetTensor(raw(far, base, 10), 0, 10, 3))
        expected = b"\3" * 10 + data[10:2000] + data[5:905] + data[2900:3000] + data[:100] + data[3100:4000]
        assert client.get(raw(far, base, 4000), 4000) == expected
        client.send(wire.BufferClear(far, 0))
        assert client.get(raw(far, base, 5 << 20), 5 << 20) == bytes(5 << 20)


# --- rejected requests ------------------------------------------------------------------------------------------------


def refused(caplog: pytest.LogCaptureFixture, client: Client) -> str:
    """Wait for the end of a connection. Returns the one line logged about it."""
    prefix = f"127.0.0.1:{client.sock.getsockname()[1]}: connection closed"

    def lines() -> list[str]:
        return [r.getMessage() for r in list(caplog.records) if r.getMessage().startswith(prefix)]

    assert client.is_closed()
    until(lambda: bool(lines()))
    (line,) = lines()
    assert line.count("\n") == 0
    return line


def bad_requests(sum: Sum) -> dict[str, tuple[bytes, str]]:
    """Return bytes that end a connection, and the error they cause."""
    ptr, base = sum.ptr, sum.base
    size = 3072
    unknown = sum.graph
    nodes, tensors = records(unknown, ptr, base, sum.places)
    strange = tensors.copy()
    strange["op"][-1] = 80  # GET_REL_POS
    small = raw(ptr, base, 100)
    return {
        "command": (b"\x63" + bytes(8), "command 99 is not known"),
        "hello again": (wire.write_request(wire.Hello()), "second HELLO"),
        "device": (wire.write_request(wire.GetAlignment(1)), "device 1 of 1"),
        "alloc": (wire.write_request(wire.AllocBuffer(9, 1)), "device 9"),
        "base": (wire.write_request(wire.BufferGetBase(ptr + 1)), "not one of this connection's"),
        "free": (wire.write_request(wire.FreeBuffer(0)), "buffer 0x0"),
        "clear": (wire.write_request(wire.BufferClear(1 << 63, 0)), "buffer 0x8000"),
        "set beyond": (wire.write_request(wire.SetTensor(small, 0, size - 1, 2)) + b"xx", "outside its buffer"),
        "set before": (wire.write_request(wire.SetTensor(raw(ptr, base - 1, 9), 0, 0, 1)) + b"x", "outside its buffer"),
        "set wrapped": (wire.write_request(wire.SetTensor(small, 0, 2**64 - 1, 1)) + b"x", "outside its buffer"),
        "get beyond": (wire.write_request(wire.GetTensor(small, 0, size + 1)), "outside its buffer"),
        "get all": (wire.write_request(wire.GetTensor(small, 0, 2**64 - 1)), "outside its buffer"),
        "memset beyond": (wire.write_request(wire.MemsetTensor(small, 50, 51, 0)), "of tensor raw of 100"),
        "memset wrapped": (wire.write_request(wire.MemsetTensor(small, 2**64 - 1, 2, 0)), "of tensor raw of 100"),
        "copy beyond": (
            wire.write_request(wire.CopyTensor(small, raw(ptr, base + size - 99, 1))),
            "outside its buffer",
        ),
        "hash beyond": (wire.write_request(wire.SetTensorHash(small, 101, 0)), "byte 101 of tensor raw"),
        "hash outside": (wire.write_request(wire.SetTensorHash(raw(ptr, base, 5000), 0, 0)), "outside its buffer"),
        "init": (wire.write_request(wire.InitTensor(raw(ptr, base, 5000))), "outside its buffer"),
        "type": (wire.write_request(wire.InitTensor(small._replace(type=99))), "type 99"),
        "line": (
            wire.write_request(wire.GetTensor(small._replace(name=b"x\nWARNING y"), 0, 9999)),
            "tensor x?WARNING y lie",
        ),
        "recompute": (wire.write_request(wire.GraphRecompute(0), wire.V7), "without a graph"),
        "operation": (
            wire.write_request(wire.graph_request(0, nodes, strange), wire.V7), "GET_REL_POS (tensor r)",
        ),
        "graph for another device": (wire.write_request(wire.graph_request(3, nodes, tensors), wire.V7), "device 3"),
    }  # fmt: skip


BAD_REQUESTS = (
    "command", "hello again", "device", "alloc", "base", "free", "clear", "set beyond", "set before", "set wrapped",
    "get beyond", "get all", "memset beyond", "memset wrapped", "copy beyond", "hash beyond", "hash outside", "init",
    "type", "line", "recompute", "operation", "graph for another device",
)  # fmt: skip


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_ends_its_connection_only(
    worker: Worker, client: Client, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line has the reason; the other client's memory and graphs stay."""
    mine = Sum(client)
    mine.write(20, 3)
    mine.compute()
    with caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"), Client(worker) as bad:
        sum = Sum(bad)
        data, message = bad_requests(sum)[case]
        assert bad.number(wire.DeviceCount()) == 1
        bad.sock.sendall(data)
        assert message in refused(caplog, bad)
    client.send(wire.GraphRecompute(0))
    assert mine.result() == {23}


def test_before_hello(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"), Client(worker, greet=False) as client:
        client.send(wire.DeviceCount())
        assert "DEVICE_COUNT before HELLO" in refused(caplog, client)


def test_silent_clients_are_closed(
    worker: Worker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamado.rpc.worker.connection.GREETING_SECONDS", 0.2)
    with caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"), Client(worker, greet=False) as client:
        client.sock.sendall(wire.write_request(wire.Hello())[:5])
        assert "no HELLO within 0.2 s" in refused(caplog, client)


def test_a_client_whose_greeting_takes_too_long_is_closed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's first thread closes it, whatever its own thread waits for."""
    monkeypatch.setattr("llamado.rpc.worker.connection.GREETING_SECONDS", 10 * GUARD)
    monkeypatch.setattr("llamado.rpc.worker.connection.ClientConnection.is_overdue", True)
    with Client(worker, greet=False, timeout=GUARD) as client:
        assert client.is_closed()


def test_a_slow_tls_handshake_is_closed(device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte arrives in time, the greeting does not."""
    monkeypatch.setattr("llamado.rpc.worker.connection.GREETING_SECONDS", 0.3)
    monkeypatch.setattr("llamado.rpc.worker.server._CHECK_INTERVAL", 0.05)
    own = Authority(tmp_path)
    with running(device, tls_cert=own.cert, tls_key=own.key) as worker, Client(worker, greet=False) as client:
        with pytest.raises(OSError):
            for byte in b"\x16\x03\x01\x40\x00\x01" + bytes(3000):
                client.sock.sendall(bytes([byte]))
                time.sleep(0.02)
        until(lambda: worker.clients == 0)


def test_no_tls_is_refused_at_once(device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the worker's first thread polls the connection."""
    greet = ClientConnection.greet

    def later(connection: ClientConnection, tls: ssl.SSLContext | None) -> wire.Request:
        time.sleep(0.2)
        return greet(connection, tls)

    monkeypatch.setattr(ClientConnection, "greet", later)
    monkeypatch.setattr("llamado.rpc.worker.server._CHECK_INTERVAL", 60.0)
    own = Authority(tmp_path)
    with (
        running(device, tls_cert=own.cert, tls_key=own.key) as worker,
        Client(worker, greet=False, timeout=GUARD) as client,
    ):
        client.send(wire.Hello())
        try:
            while client.sock.recv(64):  # an alert, then the end
                pass
        except ConnectionResetError:
            pass
        until(lambda: worker.clients == 0)


def test_a_silent_client_that_has_greeted_stays(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.rpc.worker.connection.GREETING_SECONDS", 0.1)
    with Client(worker) as client:
        time.sleep(0.3)
        assert client.number(wire.DeviceCount()) == 1


def test_one_connection_too_many(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_CONNECTIONS", 2)
    with Client(worker) as one, Client(worker):
        with Client(worker, greet=False) as three:
            assert three.is_closed()
        one.sock.close()
        until(lambda: worker.clients == 1)
        with Client(worker) as three:
            assert three.number(wire.DeviceCount()) == 1


def new_chains(client: Client, n: int, rng: np.random.Generator) -> wire.GraphCompute:
    """Return a graph of `n` chains that were never compiled before."""
    a, graph = g.new_tensor(T.F32, 64, name="a"), Graph()
    for _ in range(n):
        x = a
        for kind in rng.integers(0, 4, 8):
            x = g.unary(x, [UnaryOp.STEP, UnaryOp.RELU, UnaryOp.NEG, UnaryOp.ABS][kind])  # quickly compiled
        graph.output(str(len(graph.nodes)), x)
    places, size = layout([a, *graph.outputs.values()])
    return request(graph, *client.alloc(size), places)


@pytest.mark.slow
def test_kernels_are_rationed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that needs ever new kernels takes several turns, and has a limit."""
    monkeypatch.setattr("llamado.rpc.worker.handlers.graphs.KERNELS_PER_TURN", 2)
    device = CpuDevice(1, jit=Jit(folder=tmp_path))
    turns = []
    original = device.prepare
    monkeypatch.setattr(device, "prepare", lambda *given: turns.append(given) or original(*given))
    rng = np.random.default_rng(0)
    with (
        running(device) as worker,
        Client(worker) as client,
        caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"),
    ):
        worker.state.kernels = Budgets(6, 1000.0)
        client.send(new_chains(client, 4, rng))
        assert client.number(wire.DeviceCount()) == 1
        assert len(turns) == 2
        client.send(new_chains(client, 7, rng))
        assert "more different kernels than any model" in refused(caplog, client)
    device.close()


@pytest.mark.slow
def test_budgets_of_kernels_recover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client without budget waits, on another connection, too; other clients do not."""
    now = [1000.0]
    monkeypatch.setattr("llamado.rpc.worker.budgets.time", SimpleNamespace(monotonic=lambda: now[0]))
    device = CpuDevice(1, jit=Jit(folder=tmp_path))
    rng = np.random.default_rng(1)
    with running(device) as worker:
        worker.state.kernels = budgets = Budgets(6, 1.0)
        own = device.jit.compiled
        with Client(worker) as client:
            client.send(new_chains(client, 5, rng))
            assert client.number(wire.DeviceCount()) == 1
        assert budgets.left("loopback") == 1
        with Client(worker) as client:
            client.send(new_chains(client, 3, rng))
            until(lambda: budgets.left("loopback") == 0)
            with monkeypatch.context() as patch:
                patch.setattr("llamado.rpc.worker.client.identity", lambda *_: "198.51.100.0_24")
                with Client(worker) as newcomer:
                    newcomer.send(new_chains(newcomer, 5, rng))
                    assert newcomer.number(wire.DeviceCount()) == 1
            assert device.jit.compiled == own + 5 + 1 + 5
            now[0] += 6.0
            assert client.number(wire.DeviceCount()) == 1
        assert device.jit.compiled == own + 5 + 3 + 5 and budgets.left("loopback") == 4
        now[0] += 1000.0
        assert budgets.left("loopback") == 6
    device.close()


def test_a_fault_in_the_device_ends_one_connection(
    worker: Worker, client: Client, device: CpuDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"):
        for error, message in (
            (DeviceError("no such thing"), "no such thing"),
            (RuntimeError("oh"), "a bug of this program"),
        ):
            with monkeypatch.context() as patch, Client(worker) as bad:

                def fail(_: Graph, error: Exception = error) -> None:
                    raise error

                patch.setattr(device, "submit", fail)
                sum = Sum(bad)
                sum.compute()
                assert message in refused(caplog, bad)
    mine = Sum(client)
    mine.write(1, 1)
    mine.compute()
    assert mine.result() == {2}


# --- the cache of weights ---------------------------------------------------------------------------------------------


def upload(worker: Worker, client: Client, data: bytes) -> None:
    """Send a tensor to be cached, and wait until it is."""
    ptr, base = client.alloc(len(data))
    client.set(raw(ptr, base, len(data)), data, cache=1)
    client.number(wire.DeviceCount())
    assert worker.state.cache is not None
    worker.state.cache.flush()


def fetched(client: Client, data: bytes) -> bytes | None:
    """Return a tensor's bytes after a request by hash."""
    ptr, base = client.alloc(len(data))
    tensor = raw(ptr, base, len(data))
    if not client.number(wire.SetTensorHash(tensor, 0, fnv1a(np.frombuffer(data, np.uint8)))):
        return None
    return client.get(tensor, len(data))


def test_cache(cached: Callable[[], AbstractContextManager[Worker]], tmp_path: Path) -> None:
    """Uploads with the flag are on disk, and are loaded by hash."""
    blobs = [np.random.default_rng(i).integers(0, 256, 100_000 + i, np.uint8) for i in range(6)]
    with cached() as worker, Client(worker) as client:
        ptr, base = client.alloc(1 << 20)
        for i, blob in enumerate(blobs):
            tensor = raw(ptr, base + 150_000 * i, 7 + blob.nbytes)
            assert client.number(wire.SetTensorHash(tensor, 7, fnv1a(blob))) == 0
            client.set(tensor, blob.tobytes(), 7, cache=int(i < 5))
        assert client.number(wire.DeviceCount()) == 1
        assert worker.state.cache is not None
        worker.state.cache.flush()
    assert {p.name for p in (tmp_path / "rpc" / "loopback").iterdir()} == {
        f"{fnv1a(b):016x}-{b.nbytes}" for b in blobs[:5]
    }
    with cached() as worker, Client(worker) as client:
        ptr, base = client.alloc(1 << 20)
        places = [raw(ptr, base + 150_000 * i, 7 + b.nbytes) for i, b in enumerate(blobs)]
        asked = [wire.SetTensorHash(place, 7, fnv1a(b)) for place, b in zip(places, blobs, strict=True)]
        for request_ in asked:  # all at once
            client.reader.expect(7)  # type: ignore[arg-type]
            client.send(request_)
        answers = []
        while len(answers) < 6:
            if (got := client.reader.next()) is None:
                client.reader.feed(client.sock.recv(1000))
            else:
                answers.append(got[1][0])
        assert answers == [1, 1, 1, 1, 1, 0]
        for place, blob in zip(places, blobs[:5], strict=False):
            assert client.get(place, blob.nbytes, 7) == blob.tobytes()


def test_other_bytes_of_the_same_hash_replace_nothing(
    cached: Callable[[], AbstractContextManager[Worker]], caplog: pytest.LogCaptureFixture
) -> None:
    """This holds in the process that has checked the genuine bytes, and in another one."""
    assert fnv1a(np.frombuffer(FORGED, np.uint8)) == fnv1a(np.frombuffer(GENUINE, np.uint8))
    with cached() as worker, Client(worker) as client, Client(worker) as other:
        upload(worker, client, GENUINE)
        with caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"):
            upload(worker, other, FORGED)
        assert "other bytes with the hash of an entry were not cached" in caplog.text
        assert fetched(client, GENUINE) == GENUINE
    with cached() as worker, Client(worker) as client:
        upload(worker, client, FORGED)
        assert fetched(client, GENUINE) == GENUINE


def test_a_cache_for_each_network(
    cached: Callable[[], AbstractContextManager[Worker]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forged bytes affect only the client that sent them."""
    with cached() as worker:
        monkeypatch.setattr("llamado.rpc.worker.client.identity", lambda host, sock=None: identity("198.51.100.9"))
        with Client(worker) as other:
            upload(worker, other, FORGED)
        monkeypatch.setattr("llamado.rpc.worker.client.identity", lambda host, sock=None: identity("192.0.2.1"))
        with Client(worker) as client:
            assert fetched(client, GENUINE) is None
            upload(worker, client, GENUINE)
            assert fetched(client, GENUINE) == GENUINE
        monkeypatch.setattr("llamado.rpc.worker.client.identity", lambda host, sock=None: identity("192.0.2.77"))
        with Client(worker) as neighbor:
            assert fetched(neighbor, GENUINE) == GENUINE


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1", "loopback"), ("127.9.9.9", "loopback"), ("::1", "loopback"), ("::ffff:127.0.0.1", "loopback"),
        ("10.1.2.3", "10.1.2.0_24"), ("::ffff:10.1.2.200", "10.1.2.0_24"), ("10.1.3.3", "10.1.3.0_24"),
        ("2001:db8:1:2:3::4", "2001-0db8-0001-0002-0000-0000-0000-0000_64"),
        ("fe80::1%eth0", "fe80-0000-0000-0000-0000-0000-0000-0000_64"),
    ],
)  # fmt: skip
def test_clients_are_identified_by_their_network(host: str, name: str) -> None:
    assert identity(host) == name


def test_clients_are_identified_by_their_certificate(
    device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two from one address with different certificates share nothing; one that returns finds its own entries."""
    own = Authority(tmp_path)
    others = own.issue(tmp_path, "other-")
    options = {"tls_cert": own.cert, "tls_key": own.key, "tls_client_ca": own.pem, "cache": True}
    monkeypatch.setattr("llamado.rpc.worker.server.cache_folder", lambda: tmp_path / "rpc")
    with running(device, **options) as worker:

        def client(cert: str, key: str) -> Client:
            client = Client(worker, greet=False)
            client.sock = client_tls(own.pem, cert, key).wrap_socket(client.sock, server_hostname="127.0.0.1")
            client.ask(wire.Hello())
            return client

        with client(own.cert, own.key) as first:
            upload(worker, first, GENUINE)
        with client(*others) as second:
            assert fetched(second, GENUINE) is None
        with client(own.cert, own.key) as again:
            assert fetched(again, GENUINE) == GENUINE


def test_without_a_cache(client: Client) -> None:
    ptr, base = client.alloc(100)
    assert client.number(wire.SetTensorHash(raw(ptr, base, 100), 0, 1)) == 0
    client.set(raw(ptr, base, 100), b"x" * 100, cache=1)
    assert client.get(raw(ptr, base, 100), 100) == b"x" * 100


# --- admission --------------------------------------------------------------------------------------------------------


def test_allow(device: CpuDevice, caplog: pytest.LogCaptureFixture) -> None:
    with running(device, allow=("10.0.0.0/8", "127.0.0.0/24")) as worker, Client(worker) as client:
        assert client.number(wire.DeviceCount()) == 1
    with (
        running(device, allow=("10.0.0.0/8", "::1/128")) as worker,
        caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"),
        Client(worker, greet=False) as client,
    ):
        assert client.is_closed()
    assert "not in a network of --allow" in caplog.text


def test_mapped_ipv4_addresses(device: CpuDevice) -> None:
    """A socket for both families sees ::ffff:10.1.2.3."""
    worker = Worker([device], WorkerOptions(port=0, allow=("10.0.0.0/8",)))
    assert worker._may_connect("::ffff:10.1.2.3") and not worker._may_connect("::ffff:11.1.2.3")
    assert not worker._may_connect("fe80::1%eth0")
    worker._end()


def test_a_network_may_be_given_by_an_address_in_it(device: CpuDevice) -> None:
    worker = Worker([device], WorkerOptions(port=0, allow=(" 10.1.2.3/8 ",)))
    assert worker._may_connect("10.200.0.1") and not worker._may_connect("11.1.2.3")
    worker._end()


def test_an_invalid_network(device: CpuDevice) -> None:
    with pytest.raises(WorkerError, match="--allow everybody"):
        Worker([device], WorkerOptions(port=0, allow=("everybody",)))


def test_a_port_in_use(worker: Worker, device: CpuDevice) -> None:
    with pytest.raises(WorkerError, match=rf"127\.0\.0\.1:{worker.port}: Address already in use"):
        Worker([device], WorkerOptions(port=worker.port))


def test_a_name_of_two_addresses(device: CpuDevice) -> None:
    """ggml's clients use IPv4."""
    with running(device, host="localhost") as worker, Client(worker) as client:
        assert client.number(wire.DeviceCount()) == 1


def test_no_such_host(device: CpuDevice) -> None:
    with pytest.raises(WorkerError, match="cannot listen on nowhere"):
        Worker([device], WorkerOptions(host="nowhere.invalid", port=0))


def test_unknown_device() -> None:
    with pytest.raises(WorkerError, match="TPU0: unknown device; this machine has CPU"):
        run_worker(WorkerOptions(devices=("TPU0",)))


def test_gpu_names_fall_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guides start `rpc-server -d MTL0` beside `-d CPU`: the worker logs a warning and uses the CPU."""
    offered: list[str] = []

    def made(devices: list[CpuDevice], _: WorkerOptions) -> Worker:
        offered.extend(device.name for device in devices)
        raise WorkerError("that will do")

    monkeypatch.setattr("llamado.rpc.worker.server.Worker", made)
    with pytest.raises(WorkerError, match="that will do"):
        run_worker(WorkerOptions(devices=("MTL0", "CUDA1", "CPU"), threads=1))
    assert offered == ["CPU"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "MTL0: not available; serving CPU instead" in said[0]


@pytest.mark.parametrize(
    ("given", "offered"),
    [
        ((), ["CUDA0", "CUDA1"]),  # as ggml-rpc-server: the CPU only if there is no card
        (("CUDA1",), ["CUDA1"]),
        (("CPU", "cuda0"), ["CPU", "CUDA0"]),
        (("CPU",), ["CPU"]),
        (("CUDA5", "CUDA0", "CPU"), ["CPU", "CUDA0"]),
    ],
)
def test_graphics_cards_are_offered(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], offered: list[str]
) -> None:
    machine = install(monkeypatch, Cards((1 << 20, 2 << 20)))
    found: list[str] = []

    def made(devices: list[Any], _: WorkerOptions) -> Worker:
        found.extend(device.name for device in devices)
        raise WorkerError("that will do")

    monkeypatch.setattr("llamado.rpc.worker.server.Worker", made)
    with pytest.raises(WorkerError, match="that will do"):
        run_worker(WorkerOptions(devices=given, threads=1))
    assert found == offered and all(card.closed for card in machine.opened)
    with pytest.raises(WorkerError, match="TPU0: unknown device; this machine has CPU, CUDA0"):
        run_worker(WorkerOptions(devices=("CUDA0", "TPU0")))
    assert all(card.closed for card in machine.opened)


def test_without_a_card_the_cpu_is_offered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    install(monkeypatch, Cards(problem="there is no driver"))
    monkeypatch.setattr("llamado.devices.accelerators.has_card", lambda kind: False)
    found: list[str] = []

    def made(devices: list[Any], _: WorkerOptions) -> Worker:
        found.extend(device.name for device in devices)
        raise WorkerError("that will do")

    monkeypatch.setattr("llamado.rpc.worker.server.Worker", made)
    for given in ((), ("CUDA0",)):
        with pytest.raises(WorkerError, match="that will do"):
            run_worker(WorkerOptions(devices=given, threads=1))
    assert found == ["CPU", "CPU"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "CUDA0: not available (there is no driver); serving CPU instead" in said


def test_a_worker_ends_with_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor restarts the worker; a new process may be able to use the card."""
    machine = install(monkeypatch, Cards((1 << 20,)))
    monkeypatch.setattr(Worker, "serve", lambda worker: machine.card().die())
    monkeypatch.setattr("llamado.rpc.worker.server.signal.signal", lambda *_: None)
    with pytest.raises(WorkerError, match="device CUDA0 is lost: it has fallen off the bus; start the worker again"):
        run_worker(WorkerOptions(devices=("CUDA0",), port=0))
    assert machine.card().closed


def test_a_card_serves_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = install(monkeypatch, Cards((1 << 20, 2 << 20)))
    with running(*Accelerators().devices) as worker, Client(worker) as client:
        assert client.number(wire.DeviceCount()) == 2
        assert client.ask(wire.GetDeviceMemory(1)) == wire.DeviceMemory(2 << 20, 2 << 20)
        sum = Sum(client)
        sum.write(2, 3)
        sum.compute()
        assert sum.result() == {5} and machine.card().computed == 1 and machine.card().used > 0
        assert client.ask(wire.AllocBuffer(0, 1 << 20)) == wire.AllocResponse(0, 0), "there is less memory left"
    until(lambda: machine.card().used == 0)
    for card in machine.opened:
        card.close()


def test_a_worker_that_cannot_join_releases_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise WorkerError("no")

    monkeypatch.setattr("llamado.rpc.worker.server.ServerMembership", refuse)
    port = free_port()
    with pytest.raises(WorkerError, match="no"):
        run_worker(WorkerOptions(port=port, threads=1, join=("127.0.0.1:1",)))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


@pytest.mark.slow
def test_tls(device: CpuDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A client needs a certificate, and plain TCP is rejected; a plain worker rejects TLS."""
    own = Authority(tmp_path)
    options = {"tls_cert": own.cert, "tls_key": own.key, "tls_client_ca": own.pem}
    with running(device, **options) as worker, caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"):
        assert str(worker.endpoint) == f"tls://127.0.0.1:{worker.port}"
        with Client(worker, greet=False) as client:
            context = client_tls(own.pem, own.cert, own.key)
            client.sock = context.wrap_socket(client.sock, server_hostname="127.0.0.1")
            assert client.ask(wire.Hello()) == wire.HelloResponse(7, 0, 0, features=0x5D)
            data = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8).tobytes()
            ptr, base = client.alloc(len(data))
            client.set(raw(ptr, base, len(data)), data)
            assert client.get(raw(ptr, base, len(data)), len(data)) == data
            sum = Sum(client)
            sum.write(1, 2)
            sum.compute()
            assert sum.result() == {3}
        (tmp_path / "other").mkdir()
        other = Authority(tmp_path / "other")
        for certificate in ((), (other.cert, other.key)):
            with Client(worker, greet=False) as client, pytest.raises(OSError):
                client.sock = client_tls(own.pem, *certificate).wrap_socket(client.sock, server_hostname="127.0.0.1")
                client.ask(wire.Hello())
        with Client(worker, greet=False) as client, pytest.raises(OSError):
            client.ask(wire.Hello())
        until(lambda: worker.clients == 0)
        assert "the client shows no certificate" in caplog.text
        assert "the client's certificate is not trusted" in caplog.text
        assert "does not speak TLS" in caplog.text


def test_half_a_tls_pair(device: CpuDevice) -> None:
    with pytest.raises(WorkerError, match="--tls-cert and --tls-key"):
        Worker([device], WorkerOptions(port=0, tls_cert="x"))
    with pytest.raises(EndpointError, match="x, --tls-key y"):
        Worker([device], WorkerOptions(port=0, tls_cert="x", tls_key="y"))


# --- starting and ending ----------------------------------------------------------------------------------------------


def test_stop_ends_connections_but_not_graphs(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running graph completes; a waiting one does not start."""
    runs, go, done = threading.Event(), threading.Event(), []
    original = device.submit

    def slow(graph: Graph) -> None:
        runs.set()
        assert go.wait(60)
        original(graph)
        done.append(graph)

    monkeypatch.setattr(device, "submit", slow)
    worker = Worker([device], WorkerOptions(port=0))
    thread = threading.Thread(target=worker.serve)
    thread.start()
    with Client(worker) as one, Client(worker) as two, Client(worker) as idle:
        first, second = Sum(one), Sum(two)
        first.compute()
        assert runs.wait(60)
        second.compute()
        until(lambda: len(worker.state.devices[0].turns._waiting) == 1)
        worker.stop()
        assert idle.is_closed()
        assert thread.is_alive()
        go.set()
        thread.join(GUARD)
        assert not thread.is_alive()
    assert len(done) == 1
    assert allocated(worker) == 0 and worker.clients == 0


def test_debug_logs_each_request(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GGML_RPC_DEBUG", "1")
    with (
        running(device) as worker,
        caplog.at_level(logging.INFO, "llamado.rpc.worker.server"),
        Client(worker) as client,
    ):
        sum = Sum(client)
        sum.write(1, 2)
        sum.compute()
        client.send(wire.GraphRecompute(0))
        assert sum.result() == {3}
    lines = [r.getMessage().split(" ", 1)[1] for r in caplog.records]
    lines = [line for line in lines if line.split()[0].isupper()]  # the others tell of the client
    assert lines[:3] == ["HELLO", "ALLOC_BUFFER device 0 size 3072", f"BUFFER_GET_BASE ptr {sum.ptr}"]
    assert any(line.startswith("SET_TENSOR a (type 0, [64, 4, 1, 1], buffer") for line in lines)
    assert "GRAPH_COMPUTE device 0, uid 0, 1 nodes, 3 tensors" in lines
    assert "GRAPH_RECOMPUTE device 0 uid 0" in lines


def test_describe(device: CpuDevice, worker: Worker) -> None:
    text = worker.describe()
    assert f"127.0.0.1:{worker.port}" in text and "CPU" in text and "1 thread" in text and "cache: none" in text


@pytest.mark.slow
@pytest.mark.parametrize("number", first_of([signal.SIGTERM, signal.SIGINT]))
def test_the_command(tmp_path: Path, number: signal.Signals) -> None:
    """`llamado worker` prints its address, serves, and ends with 0 on SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-m", "llamado", "worker", "-p", "0", "-t", "1", "-m", "100"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "GGML_RPC_DEBUG": ""},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        endpoint = Endpoint.parse(first.split()[-1])

        class There:
            port = endpoint.port

        with Client(There()) as client:  # type: ignore[arg-type]
            assert client.ask(wire.GetDeviceMemory(0)) == wire.DeviceMemory(100 << 20, 100 << 20)
            sum = Sum(client)
            sum.write(2, 2)
            sum.compute()
            assert sum.result() == {4}
            process.send_signal(number)
            assert client.is_closed()
        rest = process.stderr.read()
        assert process.wait(60) == 0, rest
        assert "Traceback" not in rest
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_public_address_warns(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Worker, "serve", lambda self: self._end())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for host, warns in (("0.0.0.0", True), ("127.0.0.1", False)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "llamado.rpc.worker.server"):
            assert run_worker(WorkerOptions(host=host, port=0, threads=1)) == 0
        assert ("WARNING: 0.0.0.0 can be reached" in caplog.text) is warns


def test_an_announced_worker_names_its_address_and_share(monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[tuple[Endpoint, float]] = []
    served: list[Endpoint] = []

    def serve(worker: Worker) -> None:
        served.append(worker.endpoint)
        worker._end()

    monkeypatch.setattr("llamado.rpc.discovery.Announcement", lambda *given: announced.append(given))
    monkeypatch.setattr(Worker, "serve", serve)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert run_worker(WorkerOptions(port=0, threads=1, announce=True, share=2.5)) == 0
    assert announced == [(served[0], 2.5)]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({}, "admit only clients with a certificate, --allow only clients of given networks."),
        ({"allow": ("10.0.0.0/8",)}, "admit only clients with a certificate."),
        ({"tls_client_ca": "ca.pem"}, "never expose it to an open network."),
    ],
)
def test_the_warning_names_what_would_protect_the_worker(options: dict[str, Any], advice: str) -> None:
    assert server._exposure_warning(WorkerOptions(host="0.0.0.0", **options)).endswith(advice)


def test_a_memory_limit_above_the_machine_s_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llamado.rpc.worker.server.Worker.serve", lambda worker: worker._end())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(limits, "memory", lambda: limits.MachineMemory(1 << 30, 2_000_000_000, 9 << 30))
    for mem, warns in ((3_000_000_000, True), (2_000_000_000, False), (None, False)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "llamado.rpc.worker.server"):
            assert run_worker(WorkerOptions(port=0, threads=1, mem=mem)) == 0
        assert ("--mem allows clients 3.0 GB, but this process may use only 2.0 GB" in caplog.text) is warns


def test_a_device_without_a_limit_has_its_free_memory(device: CpuDevice) -> None:
    shared = SharedDevice(device, None)
    free, total = shared.memory()
    assert 0 < free <= total
    assert shared.allocate(free + (1 << 30)) is None


# --- the real llama.cpp -----------------------------------------------------------------------------------------------


@pytest.mark.interop
def test_llama_bench_runs_on_it(device: CpuDevice, peer_bin: Path, smollm2_path: Path) -> None:
    with running(device) as worker:
        out = subprocess.run(
            [peer_bin / "llama-bench", "-m", smollm2_path, "--rpc", f"127.0.0.1:{worker.port}", "-ngl", "99",
             "-p", "32", "-n", "8", "-r", "1", "-t", "1", "-o", "json"],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert out.returncode == 0, out.stderr
        assert out.stdout.count('"avg_ts"') == 2
        until(lambda: allocated(worker) == 0)


@pytest.mark.interop
@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_llama_server_gives_the_same_text(
    device: CpuDevice, peer_bin: Path, model: str, request: pytest.FixtureRequest
) -> None:
    """Greedy, over two of our workers and alone. Only the start counts: words of equal probability may differ.

    One worker has 8.0, through a translator.
    """
    import httpx

    path = request.getfixturevalue(model)
    prompt = {"prompt": "The capital of France is", "n_predict": 16, "temperature": 0, "cache_prompt": False}

    def ask(*arguments: str) -> str:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        process = subprocess.Popen(
            [peer_bin / "llama-server", "-m", path, "--port", str(port), "-c", "512", "--parallel", "1", "-t", "1",
             "--no-webui", *arguments],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
                for _ in range(600):
                    try:
                        if http.get("/health").status_code == 200:
                            break
                    except httpx.TransportError:
                        pass
                    assert process.poll() is None
                    time.sleep(0.1)
                return str(http.post("/completion", json=prompt).json()["content"])
        finally:
            process.terminate()
            process.wait(60)

    with (
        running(device) as one,
        running(device, protocol=8) as two,
        Translator(two.port, newer=False) as older,
    ):
        rpc = f"127.0.0.1:{one.port},127.0.0.1:{older.port}"
        ours = ask("--rpc", rpc, "-ngl", "99")
        until(lambda: allocated(one) == allocated(two) == 0)
    alone = ask()
    assert len(ours) > 20
    assert ours.split()[:5] == alone.split()[:5]
