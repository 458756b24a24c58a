"""A worker with several devices: memory, graphs and turns of each, and a model over all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_llama
from waiting import GUARD
from wire_client import Client, layout, raw, request, running, wire_of

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.split.placement import SplitOptions
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.ggml import graph as g
from llamado.ggml.graph import Graph
from llamado.gguf.types import TensorType as T
from llamado.rpc import wire
from llamado.rpc.client.device import connect
from llamado.rpc.worker.server import Worker

MIB = 1 << 20


@pytest.fixture(scope="module")
def devices() -> Iterator[list[CpuDevice]]:
    devices = [CpuDevice(1) for _ in range(3)]
    yield devices
    for device in devices:
        device.close()


@pytest.fixture
def worker(devices: list[CpuDevice]) -> Iterator[Worker]:
    with running(*devices, mem=8 * MIB) as worker:
        yield worker


@pytest.fixture
def client(worker: Worker) -> Iterator[Client]:
    with Client(worker) as client:
        yield client


class ScaledTensor:
    """r = factor · a on one device, in its own buffer."""

    def __init__(self, client: Client, device: int, factor: float) -> None:
        self.client, self.device, self.factor = client, device, factor
        self.a, self.graph = g.new_tensor(T.F32, 64, name="a"), Graph()
        self.r = self.graph.output("r", g.scale(self.a, factor))
        self.places, size = layout([self.a, self.r])
        self.ptr, self.base = client.alloc(size, device)

    def write(self, value: float) -> None:
        place = wire_of(self.a, self.ptr, self.base)
        self.client.send(wire.SetTensor(place, 0, 0, 256), np.full(64, value, np.float32).tobytes())

    def compute(self) -> None:
        self.client.send(request(self.graph, self.ptr, self.base, self.places, self.device))

    def result(self) -> set[float]:
        got = self.client.get(wire_of(self.r, self.ptr, self.base + self.places[self.r]), 256)
        return set(np.frombuffer(got, np.float32).tolist())


def free(client: Client, device: int) -> int:
    answer = client.ask(wire.GetDeviceMemory(device))
    assert isinstance(answer, wire.DeviceMemory) and answer.total == 8 * MIB
    return answer.free


def test_properties_of_the_devices(client: Client, worker: Worker) -> None:
    assert client.number(wire.DeviceCount()) == 3
    assert [client.number(wire.GetAlignment(i)) for i in range(3)] == [64] * 3
    assert [client.number(wire.GetMaxSize(i)) for i in range(3)] == [(1 << 64) - 1] * 3
    text = worker.describe()
    assert all(f"device {i}: CPU" in text for i in range(3)) and "device 3" not in text


def test_numerics_of_the_devices(devices: list[CpuDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker reports of each device what this process reports of its own."""
    kinds = {devices[0]: devices[0].numerics, devices[1]: "another kind", devices[2]: "x" * 200}
    monkeypatch.setattr(CpuDevice, "numerics", property(kinds.__getitem__))
    with running(*devices) as worker:
        found = connect(worker.endpoint)
        assert [device.numerics for device in found] == [devices[0].numerics, "another kind", None]
        for device in found:
            device.close()


@pytest.mark.parametrize(
    "ask",
    [
        wire.AllocBuffer(3, 1),
        wire.GetAlignment(3),
        wire.GetDeviceMemory(3),
        wire.GetNumerics(3),
        wire.GraphRecompute(3),
    ],
)
def test_an_unknown_device(client: Client, ask: wire.AllocBuffer) -> None:
    client.send(ask)
    assert client.is_closed()


def test_each_device_has_its_own_memory(client: Client) -> None:
    before = [free(client, i) for i in range(3)]
    ptr, _ = client.alloc(5 * MIB, 1)
    assert [b - free(client, i) for i, b in enumerate(before)] == [0, 5 * MIB, 0]
    assert client.ask(wire.AllocBuffer(1, 5 * MIB)) == wire.AllocResponse(0, 0)
    client.alloc(5 * MIB, 2)
    client.send(wire.FreeBuffer(ptr))
    assert [b - free(client, i) for i, b in enumerate(before)] == [0, 0, 5 * MIB]


def test_working_memory_belongs_to_the_computing_device(client: Client) -> None:
    row, graph = g.new_tensor(T.F32, MIB // 64), Graph()
    total = graph.output("sum", g.sum_all(g.view_2d(row, MIB // 64, 64, 0)))  # 4 MiB once it is laid out
    places, size = layout([row, total])
    ptr, base = client.alloc(size, 1)
    before = [free(client, i) for i in range(3)]
    client.send(request(graph, ptr, base, places, 2))
    client.get(wire_of(total, ptr, base + places[total]), 4)
    used = [b - free(client, i) for i, b in enumerate(before)]
    assert used[0] == used[1] == 0 and used[2] >= 4 * MIB
    client.send(wire.FreeBuffer(ptr))
    assert free(client, 2) >= before[2]


def test_the_last_graph_of_each_device(client: Client) -> None:
    """GRAPH_RECOMPUTE names the last graph of its device, not of the worker."""
    graphs = [ScaledTensor(client, device, factor) for device, factor in ((0, 2.0), (1, 3.0), (2, 5.0))]
    for value in (1.0, 7.0):
        for graph in graphs:
            graph.write(value)
        if value == 1.0:
            for graph in graphs:
                graph.compute()
        else:
            for device in (2, 0, 1):
                client.send(wire.GraphRecompute(device))
        assert [graph.result() for graph in graphs] == [{2 * value}, {3 * value}, {5 * value}]
    again = ScaledTensor(client, 1, 11.0)
    again.write(1.0)
    again.compute()
    for graph in graphs:
        graph.write(2.0)
    for device in range(3):
        client.send(wire.GraphRecompute(device))
    assert [graph.result() for graph in graphs] == [{4.0}, {21.0}, {10.0}] and again.result() == {11.0}
    client.send(wire.FreeBuffer(again.ptr))
    client.send(wire.GraphRecompute(0))  # those of other devices are there still
    client.send(wire.GraphRecompute(2))
    assert client.number(wire.DeviceCount()) == 3
    client.send(wire.GraphRecompute(1))
    assert client.is_closed()


def test_copies_between_devices(client: Client) -> None:
    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).tobytes()
    (a, at), (b, there) = client.alloc(10_000, 0), client.alloc(10_000, 2)
    client.set(raw(a, at, 10_000), data)
    assert client.number(wire.CopyTensor(raw(a, at, 10_000), raw(b, there, 10_000))) == 1
    assert client.get(raw(b, there, 10_000), 10_000) == data


def test_devices_compute_in_parallel(worker: Worker, devices: list[CpuDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client on one device does not wait for a turn on another."""
    runs, go = threading.Event(), threading.Event()
    original = devices[0].submit

    def slow(graph: Graph) -> None:
        runs.set()
        assert go.wait(60)
        original(graph)

    monkeypatch.setattr(devices[0], "submit", slow)
    with Client(worker) as busy, Client(worker, timeout=GUARD) as other:
        one, two = ScaledTensor(busy, 0, 2.0), ScaledTensor(other, 1, 3.0)
        one.write(1.0)
        one.compute()
        assert runs.wait(60)
        try:
            two.write(1.0)
            two.compute()
            assert two.result() == {3.0}
        finally:
            go.set()
        assert one.result() == {2.0}


@pytest.mark.slow
def test_a_model_over_all_devices(devices: list[CpuDevice], tmp_path: Path) -> None:
    """Layers on two devices of one worker, the rest on a third; the text is that of one machine."""
    path = make_llama(tmp_path / "m.gguf", n_layer=4, n_vocab=320)
    with LoadedModel.load(path, EngineOptions(n_ctx=256, n_threads=1)) as llama:
        expected = llama.generate("Hello world", n_predict=16, temperature=0.0)
    with running(*devices) as worker:
        split = SplitOptions(rpc=(str(worker.endpoint),), tensor_split=(1.0, 1.0, 1.0), n_gpu_layers=99)
        with LoadedModel.load(path, EngineOptions(n_ctx=256, n_threads=1, split=split)) as llama:
            assert llama.generate("Hello world", n_predict=16, temperature=0.0) == expected
            assert all(shared.allocated > 0 for shared in worker.state.devices)
        found = connect(worker.endpoint)
        names = [device.name for device in found]
        assert len(set(names)) == 3
        for device in found:
            device.close()
