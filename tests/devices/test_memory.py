"""Host memory: buffers, locking, placement of threads."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import PLAIN, WEIGHTS, Array, Case, each_type, jit_for, new, values, weight_bytes

from llamado.devices.cpu import memory, numa
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.memory import CpuBuffer
from llamado.devices.cpu.numa import Matrix, MemoryNode, NumaBinding, memory_nodes
from llamado.devices.device import DeviceError
from llamado.devices.limits import MachineMemory
from llamado.ggml import Graph
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T


def test_buffers_are_zeroed_and_refuse_what_does_not_fit(best: CpuDevice) -> None:
    x = new(10)
    x.buffer = best.alloc(40)
    assert not best.read(x, 0, 40).result().any()
    best.write(x, np.arange(10, dtype=np.float32))
    best.write(x, np.array([7.0], np.float32), 8)
    assert best.read(x, 0, 40).result().view(np.float32).tolist() == [0, 1, 7, 3, 4, 5, 6, 7, 8, 9]
    for data, offset in ((np.zeros(11, np.float32), 0), (np.zeros(1, np.float32), 40), (np.zeros(1, np.uint8), -1)):
        with pytest.raises(DeviceError, match="do not fit"):
            best.write(x, data, offset)
    x.offset = 4
    with pytest.raises(DeviceError, match="buffer of 40"):
        best.write(x, np.zeros(10, np.float32))
    with pytest.raises(DeviceError, match="nowhere was not computed"):
        best.read(new(4, name="nowhere"), 0, 16)
    with pytest.raises(DeviceError, match="MB"):
        best.alloc(1 << 62)
    empty = best.alloc(0)
    assert empty.size == 0
    empty.free()


def test_copies_between_tensors_may_overlap(best: CpuDevice) -> None:
    whole = new(100)
    whole.buffer = best.alloc(400)
    best.write(whole, np.arange(100, dtype=np.float32))
    low, high = g.view_1d(whole, 60), g.view_1d(whole, 60, 4 * 30)
    best.copy(low, high)
    assert best.read(high, 0, 240).result().view(np.float32).tolist() == list(range(60))
    with pytest.raises(DeviceError, match="copy of 240"):
        best.copy(low, whole)


def test_memory_is_counted(best: CpuDevice) -> None:
    free, total = best.memory()
    assert 0 < free <= total


def before_a_wall(size: int) -> Array:
    """Memory that ends where the next page must not be touched."""
    page = mmap.PAGESIZE
    n = -(-size // page) * page
    pages = mmap.mmap(-1, n + page)
    array = np.frombuffer(pages, np.uint8)
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(array.ctypes.data + n), ctypes.c_size_t(page), 0):
        pytest.skip("no mprotect here")
    return array[n - size : n]


@pytest.mark.slow
@pytest.mark.parametrize("type", each_type([*WEIGHTS, *PLAIN]))
def test_weights_at_the_end_of_a_file_are_not_read_past(cpu: CpuDevice, type: T) -> None:
    """A mapped file may end with the page: one byte more would end the process."""
    n = 2 * type.block_size if type in WEIGHTS else 13
    raw = weight_bytes(type, n, 9)
    wall = before_a_wall(raw.size)
    wall[:] = raw
    for columns in (1, 12):
        w, x, ids = new(n, 9, type=type), new(n, columns), new(2, type=T.I32)
        w.buffer = cpu.adopt(wall)
        data = {w: raw, x: values(n, columns), ids: [8, 0]}
        Case({"y": g.mul_mat(w, x), "rows": g.get_rows(w, ids)}, data).check(cpu, rtol=0.05, atol=0.05)


def test_masks_of_odd_length_stay_inside_their_buffer(best: CpuDevice) -> None:
    for n_kv, n in ((2048, 1), (2041, 3), (4095, 16)):
        mask = new(n_kv, n, type=T.F16)
        mask.buffer = best.alloc(mask.nbytes)
        q, k = new(16, n, 1), new(16, n_kv, 1, type=T.F16)
        case = Case(
            {"y": g.flash_attn_ext(q, k, k, mask, 1.0)}, {mask: np.full((n, n_kv), -np.inf), q: values(16, n, 1)}
        )
        assert not case.run(best)["y"].any()


# --- mlock ------------------------------------------------------------------------------------------------------------


def locked() -> int:
    """Kilobytes of this process that are locked."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc here")
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmLck"))


def test_locked_memory_stays_in_ram(best: CpuDevice, caplog: pytest.LogCaptureFixture) -> None:
    before = locked()
    buffer = best.adopt(np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8))
    if not buffer.lock():
        pytest.skip("this process may not lock memory")
    assert locked() >= before + 1024 and not caplog.records


@pytest.mark.parametrize("mapped", [True, False], ids=["a mapped file", "own pages"])
def test_memory_above_the_containers_limit_is_not_locked(
    mapped: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(memory, "_mlock", lambda address, size: asked.append(size) or 0)
    buffer = CpuBuffer(np.zeros(8 << 20, np.uint8)) if mapped else CpuBuffer.allocate(8 << 20)
    free, total = (7, 64) if mapped else (0, 7)
    monkeypatch.setattr(memory.limits, "memory", lambda: MachineMemory(free << 20, total << 20, 1 << 34))
    assert not buffer.lock() and not asked
    assert "--mlock" in caplog.text and "may have 7 MB" in caplog.text
    monkeypatch.setattr(memory.limits, "memory", lambda: MachineMemory((free + 1) << 20, (total + 1) << 20, 1 << 34))
    assert buffer.lock() and asked == [8 << 20]


def test_a_refused_lock_logs_a_warning_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = CpuBuffer.allocate(5_000_000)
    monkeypatch.setattr(memory, "_mlock", lambda address, size: 12)
    with caplog.at_level(logging.WARNING):
        assert not buffer.lock()
    assert "5 MB" in caplog.text and "ulimit -l" in caplog.text and os.strerror(12) in caplog.text
    caplog.clear()
    monkeypatch.setattr(memory, "_mlock", lambda address, size: -1)
    assert not buffer.lock()
    assert "no mlock" in caplog.text and "ulimit" not in caplog.text
    assert CpuBuffer.allocate(0).lock()


def test_the_system_call_reports_its_error() -> None:
    assert memory._mlock(1 << 46, 1 << 40) > 0


# --- memory nodes -----------------------------------------------------------------------------------------------------

needs_two = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs that can be chosen"
)


def halves() -> list[MemoryNode]:
    """A machine of two nodes, made of the CPUs there are."""
    cpus = sorted(os.sched_getaffinity(0))
    return [MemoryNode(0, frozenset(cpus[::2])), MemoryNode(1, frozenset(cpus[1::2]))]


def affinities(device: CpuDevice) -> list[frozenset[int]]:
    """The CPUs of the team's own threads, in order."""
    found = sorted((t for t in device.team._threads), key=lambda t: t.name)
    return [frozenset(os.sched_getaffinity(t.native_id or 0)) for t in found]


def spread(strategy: str, n: int, monkeypatch: pytest.MonkeyPatch) -> CpuDevice:
    monkeypatch.setattr("llamado.devices.cpu.numa.memory_nodes", halves)
    device, x = CpuDevice(n, jit=jit_for("portable"), numa=strategy), new(8, 40)
    Case({"y": g.silu(x)}, {x: values(8, 40)}).check(device)  # all threads have started
    return device


@needs_two
def test_numa_distribute_keeps_threads_of_a_node_adjacent(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.sched_getaffinity(0)
    device = spread("distribute", 4, monkeypatch)
    even, odd = (node.cpus for node in halves())
    assert affinities(device) == [even, odd, odd]
    assert os.sched_getaffinity(0) == own  # the caller is only borrowed
    device.close()


@needs_two
def test_numa_isolate_keeps_threads_on_the_starting_node(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.sched_getaffinity(0)
    home = halves()[1].cpus
    os.sched_setaffinity(0, {min(home)})
    try:
        monkeypatch.setattr("llamado.devices.cpu.numa.os.sched_getaffinity", lambda pid, real=os.sched_getaffinity: own)
        placement = NumaBinding("isolate", 2, [MemoryNode(0, frozenset(own) - home), MemoryNode(1, home)])
    finally:
        monkeypatch.undo()
        os.sched_setaffinity(0, own)
    with placement.pinned(0):
        assert os.sched_getaffinity(0) == home
    assert os.sched_getaffinity(0) == own


@needs_two
def test_numa_numactl_keeps_the_inherited_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    device = spread("numactl", 3, monkeypatch)
    assert affinities(device) == [frozenset(os.sched_getaffinity(0))] * 2
    device.close()


def test_numa_on_one_node_logs_once_and_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    from llamado.devices.cpu.numa import _log_single_node

    _log_single_node.cache_clear()
    with caplog.at_level(logging.INFO, "llamado.devices"):
        for _ in range(2):
            placement = NumaBinding("distribute", 2, [MemoryNode(0, frozenset({0}))])
    assert caplog.text.count("one memory node") == 1
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    placement.pin(1)
    with placement.pinned(0):
        assert before is None or os.sched_getaffinity(0) == before


def test_an_unknown_strategy_is_refused_before_threads_are_made() -> None:
    before = threading.active_count()
    with pytest.raises(DeviceError, match="distribute, isolate, numactl"):
        CpuDevice(2, jit=jit_for("portable"), numa="everywhere")
    assert threading.active_count() == before


def test_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    for name, cpus in (("node0", "0-3,8\n"), ("node1", "4-7\n"), ("node10", "9"), ("node2", "\n"), ("power", "x")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus)
    cpus = {0: frozenset({0, 1, 2, 3, 8}), 1: frozenset({4, 5, 6, 7}), 10: frozenset({9})}
    assert memory_nodes(tmp_path) == [MemoryNode(*node) for node in cpus.items()]
    assert memory_nodes(tmp_path / "missing") == []


def resident(address: int) -> int:
    """Bytes of the mapping at an address that are in this process's page tables."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            found = int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("nothing is mapped there")


@needs_two
@pytest.mark.skipif(sys.platform != "linux", reason="nodes are Linux's")
def test_weights_lie_on_the_node_of_their_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each matrix the first half of the rows on the first node; every page once, also where rows end within one."""
    page = mmap.PAGESIZE
    rows = [(64, 3 * page // 2), (2, 8 * page), (30, 100)]  # the last of three experts
    size = sum(n * row for n, row in rows) + 2 * 30 * 100
    (tmp_path / "weights").write_bytes(bytes(size))
    memory = np.memmap(tmp_path / "weights", np.uint8, "r")
    start, at, weights = memory.ctypes.data, 0, []
    for n, row in rows:
        weights.append(Matrix(start + at, n, row, 3 if row == 100 else 1))
        at += n * row * weights[-1].n
    taken: list[tuple[int, int, int, frozenset[int]]] = []

    def bring(begin: int, end: int, node: int, real: Any = numa._load_and_move) -> None:
        taken.append((begin - start, end - start, node, frozenset(os.sched_getaffinity(0))))
        real(begin, end, node)

    monkeypatch.setattr(numa, "_load_and_move", bring)
    nodes, before = halves(), os.sched_getaffinity(0)
    assert resident(start) == 0
    NumaBinding("distribute", 2, nodes).spread(weights)
    assert os.sched_getaffinity(0) == before
    assert resident(start) == -(-size // page) * page
    assert all(cpus == nodes[node].cpus for _, _, node, cpus in taken)
    first = {(begin, end) for begin, end, _, cpus in taken if cpus == nodes[0].cpus}
    second = {(begin, end) for begin, end, node, _ in taken if node == 1}
    assert (0, 48 * page) in first and (48 * page, 96 * page) in second  # 32 rows each
    assert (96 * page, 104 * page) in first and (104 * page, 112 * page) in second
    assert {end - begin for begin, end in (first | second) if begin >= 112 * page} == {1500}
    taken.clear()
    NumaBinding(None, 2, nodes).spread(weights)
    NumaBinding("isolate", 2, nodes).spread(weights)
    assert not taken


@pytest.mark.slow
def test_programs_outlive_a_larger_one(best: CpuDevice) -> None:
    """A graph that needs more working memory moves all programs; what was compiled before still runs."""
    device = CpuDevice(2, jit=best.jit)
    x = new(16, 2)
    small = Case({"y": g.silu(g.scale(x, 2.0))}, {x: values(16, 2)})
    first = small.check(device)["y"]
    big, w = new(4096, 400), new(4096, 400)
    Case({"y": g.mul(g.cont(g.permute(big, 0, 2, 1, 3)), g.reshape(w, 4096, 1, 400))}, {big: values(4096, 400)}).run(
        device
    )
    assert np.array_equal(small.run(device)["y"], first)
    graphs = []
    for n in range(1, 200):  # more graphs than are kept
        graph, y = Graph(), new(8, n)
        y.buffer = device.alloc(32 * n)
        graph.output("y", g.silu(y))
        device.submit(graph)
        graphs.append(graph)
    assert np.array_equal(small.run(device)["y"], first)
    device.close()
