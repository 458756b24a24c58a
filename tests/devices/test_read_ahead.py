"""Weights that do not fit memory: what programs ask for and give back, and that answers stay the same."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from running import BEST, Array, jit_for, new, values, weight_bytes
from waiting import until

from llamado.devices.compile.compiler import Compiler
from llamado.devices.compile.program import Operation, plan
from llamado.devices.cpu.device import CpuDevice, cpu_target
from llamado.devices.cpu.kernels import paging
from llamado.devices.cpu.memory import CpuBuffer
from llamado.devices.cpu.program import link
from llamado.devices.cpu.read_ahead import ReadAhead
from llamado.ggml import Graph
from llamado.ggml import graph as g
from llamado.ggml.ops import GluOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType as T

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")

N, N_LAYERS, N_EXPERTS, N_USED = 512, 12, 16, 2
START = 96  # weights lie anywhere in pages
PAGE = mmap.PAGESIZE


@cache
def _weights(type: T, size: int, seed: int) -> bytes:
    return weight_bytes(type, N, size // type.row_bytes(N), seed).tobytes()


class Model:
    """Layers of a matrix (of `n` rows as columns) and of experts after it, their weights in one mapped file."""

    def __init__(self, path: Path, *, experts: bool = False, table: bool = False) -> None:
        kinds = [(N, N)] * N_LAYERS
        self.names = [f"dense{i}" for i in range(len(kinds))]
        self.weights = [new(*ne, type=T.Q8_0, name=name) for ne, name in zip(kinds, self.names, strict=True)]
        self.experts = [new(N, N, N_EXPERTS, type=T.Q4_0, name=f"experts{i}") for i in range(3 if experts else 0)]
        self.table = new(N, 64, type=T.Q8_0, name="table") if table else None
        every = [*self.weights, *self.experts, *([self.table] if self.table is not None else [])]
        with path.open("wb") as file:
            file.write(bytes(START))
            for seed, w in enumerate(every):
                file.write(_weights(w.type, w.nbytes, seed))
            file.flush()
            os.fsync(file.fileno())  # what is not on the disk yet stays in memory
        with path.open("rb") as opened:
            self.pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self.memory = np.frombuffer(self.pages, np.uint8)
        self.bytes: list[tuple[Tensor, Array]] = []
        at = START
        for w in every:
            self.bytes.append((w, self.memory[at : at + w.nbytes]))
            at += w.nbytes
        self.size = at - START
        self.path, self.address = path, self.memory.ctypes.data
        self.places = [(w, data.ctypes.data) for w, data in self.bytes]

    def graph(self, n_tokens: int) -> tuple[Graph, dict[Tensor, Array]]:
        """A program through all of it, and what it starts from."""
        x = first = new(N, n_tokens)
        data: dict[Tensor, Array] = {first: values(N, n_tokens)}
        if self.table is not None:
            rows = new(n_tokens, type=T.I32)
            data[rows] = np.arange(n_tokens, dtype=np.int32) * 7 % 64
            x = g.add(x, g.get_rows(self.table, rows))
        for w in self.weights:
            x = g.rms_norm(g.add(x, g.mul_mat(w, x)), 1e-5)
        if self.experts:
            chosen = new(N_USED, n_tokens, type=T.I32)
            rng = np.random.default_rng(3)
            data[chosen] = np.array([rng.choice(N_EXPERTS, N_USED, replace=False) for _ in range(n_tokens)], np.int32)
            wide = g.reshape(x, N, 1, n_tokens)
            up, gate, down = self.experts
            both = g.glu_split(g.mul_mat_id(gate, wide, chosen), g.mul_mat_id(up, wide, chosen), GluOp.SWIGLU)
            x = g.mul_mat_id(down, both, chosen)
        graph = Graph()
        graph.output("y", x)
        return graph, data

    def address_of(self, weight: Tensor) -> int:
        return next(data.ctypes.data for w, data in self.bytes if w is weight)

    def resident(self) -> Array:
        """Of each page of the file, whether it is in memory (mincore(2))."""
        found = np.zeros(-(-len(self.memory) // PAGE), np.uint8)
        libc = ctypes.CDLL(None)
        libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        assert libc.mincore(self.memory.ctypes.data, len(self.memory), found.ctypes.data) == 0
        return (found & 1).astype(bool)

    def pages_of(self, start: int, size: int) -> slice:
        """Pages that lie whole in `size` bytes from an address on."""
        at = start - self.address
        return slice(-(-at // PAGE), (at + size) // PAGE)

    def drop(self) -> None:
        """Takes the file out of memory; skips the test where the system keeps it."""
        self.pages.madvise(mmap.MADV_DONTNEED)
        with self.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if self.resident().any():
            pytest.skip("this file system keeps files in memory")


class Bench:
    """A device with a model's weights and `room` bytes of memory for them."""

    def __init__(self, model: Model, room: int, window: int = 300_000) -> None:
        self.model = model
        self.device = CpuDevice(2, jit=jit_for(BEST))
        self.device.read_ahead = ReadAhead(lambda: room, window)
        self.device.load(model.bytes)
        self.chosen = np.zeros(0, np.int32)
        self.graphs: list[Graph] = []  # whose inputs programs point to

    def bound(self, n_tokens: int) -> Graph:
        graph, data = self.model.graph(n_tokens)
        self.graphs.append(graph)
        for tensor, numbers in data.items():
            tensor.buffer, tensor.offset = self.device.alloc(tensor.nbytes), 0
            self.device.write(tensor, numbers)
            if tensor.type is T.I32:
                self.chosen = numbers
        return graph

    def answer(self, n_tokens: int) -> bytes:
        graph = self.bound(n_tokens)
        for _ in range(2):
            self.device.submit(graph)
        y = graph.outputs["y"]
        return self.device.read(y, 0, y.nbytes).result().tobytes()

    def operations(self, n_tokens: int) -> list[Operation]:
        """A program's, as they are woven."""
        self.device.read_ahead.assess()
        compiler = Compiler(self.bound(n_tokens), cpu_target(self.device.jit.lowering, 2))
        return self.device.read_ahead.add_to(compiler.compile())

    def run(self, operations: list[Operation]) -> None:
        """Some operations alone."""
        arena = CpuBuffer.allocate(1 << 24)
        size = plan(operations)
        program = link(operations, self.device.jit, arena.address, size, self.device.team.n_counters)
        self.device.team.run(program.table, program.counters, 2)


@pytest.fixture(params=[1, 40])
def n_tokens(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def number(operation: Operation, field: str) -> int:
    value = operation.fields[field]
    assert isinstance(value, int)
    return value


def until_resident(model: Model, pages: slice) -> None:
    until(lambda: model.resident()[pages].all(), "what was asked for does not come")


@pytest.mark.slow
def test_weights_that_fit_cost_nothing(tmp_path: Path, n_tokens: int) -> None:
    bench = Bench(model := Model(tmp_path / "model", experts=True), 1 << 40)
    asks = {paging.prefetch, paging.prefetch_chosen, paging.prefetch_routed, paging.release}
    assert not asks & {o.kernel for o in bench.operations(n_tokens)}
    bench = Bench(model, model.size - 1)
    assert asks & {o.kernel for o in bench.operations(n_tokens)}
    bench.device.close()


def test_weights_in_memory_are_not_prefetched(tmp_path: Path) -> None:
    model = Model(tmp_path / "model")
    with model.path.open("rb") as file:
        private = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    for own in (model.memory.copy(), private):  # what is written to private pages is nowhere else
        model.bytes = [(w, own[at - model.address :][: w.nbytes]) for w, at in model.places]
        bench = Bench(model, 0)
        assert {o.kernel for o in bench.operations(1)}.isdisjoint({paging.prefetch, paging.release})
        bench.device.close()


@pytest.mark.parametrize("share", [0.0, 0.6, 0.9])
def test_weights_that_do_not_stay_are_released_after_use(tmp_path: Path, n_tokens: int, share: float) -> None:
    model = Model(tmp_path / "model", table=True)
    bench = Bench(model, room := int(share * model.size))
    operations, given = bench.operations(n_tokens), 0
    for before, operation in itertools.pairwise(operations):
        if operation.kernel is paging.release:
            start, size = number(operation, "start"), number(operation, "size")
            (used,) = (span for span in before.reads if "w" in before.fields and span.place.base is None)
            assert operation.reads == before.writes, "threads may still read it"
            assert start % PAGE == 0 and used.place.offset <= start
            assert used.place.offset + used.size - PAGE < start + size <= used.place.offset + used.size
            assert number(operation, "offset") == start - model.address
            given += size
    assert model.size - given <= room or not share
    assert model.size - given > room // 2, "more is read anew than must be"
    bench.device.close()


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_every_weight_is_prefetched_once_one_window_ahead(tmp_path: Path, n_tokens: int, share: float) -> None:
    """The end of a run prefetches the first weights of the next one."""
    model, window = Model(tmp_path / "model"), 400_000
    bench = Bench(model, int(share * model.size), window)
    order = {data.ctypes.data: i for i, (_, data) in enumerate(model.bytes)}
    asked: dict[int, int] = {}  # by weight, how many were used before
    sizes = []
    for operation in bench.operations(n_tokens):
        if operation.kernel is paging.prefetch:
            weight = order[number(operation, "start")]
            assert weight not in asked and number(operation, "size") == model.bytes[weight][1].nbytes
            asked[weight] = len(sizes)
        elif operation.kernel is paging.release:
            sizes[-1] = number(operation, "size")
        elif "w" in operation.fields:
            sizes.append(0)
    assert len(asked) == len(sizes) == len(order)
    for weight, n_used in asked.items():
        between = [*range(n_used, weight)] if n_used <= weight else [*range(n_used, len(sizes)), *range(weight)]
        ahead = sum(sizes[i] for i in between)
        assert window - max(sizes) - PAGE * len(sizes) <= ahead <= window, (weight, n_used)
    bench.device.close()


def test_only_resident_weights_stay_in_memory_after_a_run(tmp_path: Path) -> None:
    model = Model(tmp_path / "model")
    model.drop()
    bench = Bench(model, int(0.7 * model.size))
    bench.answer(1)
    operations = bench.operations(1)
    asked_last = {number(o, "start") for o in operations[-30:] if o.kernel is paging.prefetch}
    for given in (o for o in operations if o.kernel is paging.release):
        start, size = number(given, "start"), number(given, "size")
        weight = max(data.ctypes.data for _, data in model.bytes if data.ctypes.data <= start)
        assert model.resident()[model.pages_of(weight, start - weight)].all()
        if weight not in asked_last:
            assert not model.resident()[model.pages_of(start, size)].any()
    bench.device.close()


def test_requested_pages_are_read(tmp_path: Path) -> None:
    model = Model(tmp_path / "model")
    bench = Bench(model, 0)
    asks = [o for o in bench.operations(1) if o.kernel is paging.prefetch][:3]
    model.drop()
    bench.run(asks)
    for ask in asks:
        until_resident(model, model.pages_of(number(ask, "start"), number(ask, "size")))
    assert not model.resident().all()
    bench.device.close()


@pytest.mark.slow
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_chosen_experts_are_prefetched_before_use(tmp_path: Path, n_tokens: int) -> None:
    """All three matrices of those that were chosen, and of no other."""
    model = Model(tmp_path / "model", experts=True)
    bench = Bench(model, model.size // 2)
    operations = bench.operations(n_tokens)
    kinds = {paging.prefetch_chosen, paging.prefetch_routed}
    asks = [i for i, o in enumerate(operations) if o.kernel in kinds]
    uses = [i for i, o in enumerate(operations) if "expert_bytes" in o.fields and o.kernel not in kinds]
    assert len(asks) == len(uses) == 3
    assert all(ask < use for ask, use in zip(asks, [uses[0], uses[0], uses[0 if n_tokens == 1 else 1]], strict=True))
    routed = [o for o in operations if o.kernel.name == "group_by_expert"]
    model.drop()
    bench.run([*routed, *(operations[i] for i in asks)])
    chosen = {*bench.chosen.reshape(-1).tolist()}
    for w in model.experts:
        start = model.address_of(w)
        for expert in range(N_EXPERTS):
            pages = model.pages_of(start + expert * w.nb[2], w.nb[2])
            if expert in chosen:
                until_resident(model, pages)
            elif not {expert - 1, expert + 1} & chosen:
                assert not model.resident()[pages].all()
    bench.device.close()


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_answers_are_the_same(tmp_path: Path, n_tokens: int, experts: bool) -> None:
    model = Model(tmp_path / "model", experts=experts, table=True)
    found = []
    for room in (1 << 40, model.size // 2, 0):
        model.drop()
        bench = Bench(model, room)
        found.append(bench.answer(n_tokens))
        bench.device.close()
    assert found[0] == found[1] == found[2] and any(found[0])
