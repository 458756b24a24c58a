"""Measuring devices: on a clock that only the device moves, and on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import Buffer, Bytes, DeviceError, DeviceLost, LoadProgress
from llamado.devices.split import measure as speed
from llamado.devices.split.measure import WEIGHTS, measure, measure_all
from llamado.ggml.graph import Graph
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Endpoint:
    host: str


@dataclass
class FakeBuffer:
    device: FakeDevice
    size: int

    def free(self) -> None:
        self.device.held -= self.size


@dataclass
class FakeDevice:
    """A device whose every doing takes a known time."""

    clock: Clock
    name: str = "RPC0[far:1]"
    endpoint: Endpoint | None = field(default_factory=lambda: Endpoint("far"))
    zeroes_memory: bool = False
    total: int = 1 << 30
    round_trip: float = 0.01
    bandwidth: float = 1e8
    decode: float = 1e10
    prefill: float = 1e8
    graph_delay: float = 0.0
    jitter: Sequence[float] = (0.0,)
    held: int = 0
    links: bool = False
    most: int = 0
    copied: int = 0
    sent: int = 0
    reads: int = 0
    begun: threading.Barrier | None = None

    @property
    def local(self) -> bool:
        return self.endpoint is None

    def place(self, tensors: Sequence[Tensor]) -> list[Buffer]:
        if self.begun is not None:
            self.begun.wait(timeout=60)
        buffer = FakeBuffer(self, sum(t.nbytes for t in tensors))
        self.held += buffer.size
        self.most = max(self.most, self.held)
        for tensor in tensors:
            tensor.buffer, tensor.offset = buffer, 0
        return [buffer]

    def load(self, weights: Sequence[tuple[Tensor, Bytes]], progress: LoadProgress | None = None) -> list[Buffer]:
        raise NotImplementedError

    def write(self, tensor: Tensor, data: Any, offset: int = 0) -> None:
        self.sent += data.nbytes
        self.clock.now += data.nbytes / self.bandwidth

    def prepare(self, graph: Graph) -> object:
        return None

    def submit(self, graph: Graph) -> None:
        assert all(t.buffer is not None for t in (*graph.inputs.values(), *graph.outputs.values(), *graph.leafs))
        n_tokens = graph.inputs["hidden"].ne[1]
        n = sum(node.src[0].nbytes for node in graph.nodes if node.src[0])
        self.clock.now += self.graph_delay + n / (self.decode if n_tokens == 1 else self.prefill)

    def read(self, tensor: Tensor, offset: int, size: int) -> Future[Bytes]:
        self.reads += 1
        self.clock.now += self.round_trip + self.jitter[self.reads % len(self.jitter)]
        future: Future[Bytes] = Future()
        future.set_result(np.zeros(size, np.uint8))
        return future

    def copy(self, source: Tensor, target: Tensor) -> None:
        assert source.nbytes == target.nbytes
        self.copied += source.nbytes

    def memory(self) -> tuple[int, int]:
        return self.total - self.held, self.total

    def close(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speed, "time", clock)
    return clock


@pytest.mark.parametrize("type", [TensorType.Q4_K, TensorType.Q8_0, TensorType.F16])
@pytest.mark.parametrize("width", [576, 2048, 8192])
def test_speeds_and_link_come_out_as_they_are(clock: Clock, type: TensorType, width: int) -> None:
    device = FakeDevice(clock)
    figures = measure(device, type=type, width=width)
    assert (figures.name, figures.local, figures.free, figures.total) == (device.name, False, 1 << 30, 1 << 30)
    assert figures.decode == pytest.approx(1e10, rel=0.02)
    assert figures.prefill == pytest.approx(1e8, rel=0.02)
    assert figures.round_trip == pytest.approx(0.01, rel=0.05)
    assert figures.bandwidth == pytest.approx(1e8, rel=0.02)
    assert device.held == 0 and device.most < 3 * WEIGHTS
    assert clock.now - 100 < 2.0


def test_graph_delays_count_as_round_trip_and_noise_does_not(clock: Clock) -> None:
    # 20 ms on each graph command, as a tap has them, and now and then 7 ms more
    device = FakeDevice(clock, graph_delay=0.02, jitter=(0.007, 0.0, 0.003))
    figures = measure(device)
    assert figures.round_trip == pytest.approx(0.03, rel=0.05)
    assert figures.decode == pytest.approx(1e10, rel=0.02)


def test_slow_links_are_not_filled_with_measuring(clock: Clock) -> None:
    device = FakeDevice(clock, bandwidth=1e6)
    assert measure(device).bandwidth == pytest.approx(1e6, rel=0.02)
    assert device.sent < 1 << 20


def test_slow_devices_are_measured_by_few_runs(clock: Clock) -> None:
    device = FakeDevice(clock, decode=1e8, prefill=1e6)
    figures = measure(device, budget=0.5)
    assert figures.decode == pytest.approx(1e8, rel=0.02) and figures.prefill == pytest.approx(1e6, rel=0.02)
    assert device.reads < 30


def test_this_machine_has_no_link(clock: Clock) -> None:
    figures = measure(FakeDevice(clock, name="CPU", endpoint=None, round_trip=0.0))
    assert figures.local and figures.bandwidth is None and figures.round_trip == 0.0


def test_measuring_touches_memory_that_clearing_leaves_unmapped(clock: Clock) -> None:
    ours, ggmls = FakeDevice(clock), FakeDevice(clock, zeroes_memory=True)
    measure(ours)
    measure(ggmls)
    assert ours.copied > WEIGHTS // 2 and ggmls.copied == 0


def test_no_memory_no_speeds(clock: Clock) -> None:
    figures = measure(FakeDevice(clock, total=1 << 20))
    assert figures.decode is None and figures.free == 1 << 20
    small = FakeDevice(clock, total=64 << 20)
    assert measure(small).decode is not None and small.most < 64 << 20
    silent = FakeDevice(clock, total=0)
    silent.memory = lambda: (0, 0)  # type: ignore[method-assign]
    assert measure(silent).decode is not None


def test_failures_are_reported_and_memory_is_released(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(clock)

    def lost(graph: Graph) -> None:
        raise DeviceLost(device.name, "the cable")

    monkeypatch.setattr(device, "submit", lost)
    with pytest.raises(DeviceLost, match="the cable"):
        measure_all([device])
    assert device.held == 0
    full = FakeDevice(clock)

    def no_room(tensors: Sequence[Tensor]) -> list[Buffer]:
        raise DeviceError("no room")

    monkeypatch.setattr(full, "place", no_room)
    with pytest.raises(DeviceError, match="no room"):
        measure(full)


def test_machines_are_measured_in_parallel_and_devices_in_turn() -> None:
    begun = threading.Barrier(2)
    # each machine has a clock of its own; both must be at work at once to pass the barrier
    a = [FakeDevice(Clock(), name=f"RPC{i}[a:1]", endpoint=Endpoint("a"), begun=begun) for i in range(2)]
    b = [FakeDevice(Clock(), name=f"RPC{i}[b:1]", endpoint=Endpoint("b"), begun=begun) for i in range(2, 4)]
    devices = [a[0], b[0], a[1], b[1]]
    assert [figures.name for figures in measure_all(devices, budget=0.1)] == [device.name for device in devices]
    hosts = ("localhost", "127.0.0.5", "::1")
    assert {speed._machine(FakeDevice(Clock(), endpoint=Endpoint(host))) for host in hosts} == {""}
    assert speed._machine(FakeDevice(Clock(), endpoint=None)) == "" and speed._machine(devices[0]) == "a"
    assert measure_all([]) == []


@pytest.mark.slow
def test_the_cpu() -> None:
    device = CpuDevice(1)
    try:
        figures = measure(device, type=TensorType.Q4_0, width=256, budget=0.2)
        assert figures.name == "CPU" and figures.local and 0 < figures.free <= figures.total
        # one thread: between a very slow machine's rate and what no memory gives
        assert figures.decode is not None and 1e7 < figures.decode < 1e12
        assert figures.prefill is not None and 1e5 < figures.prefill < figures.decode
    finally:
        device.close()
