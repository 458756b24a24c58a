"""Fuzzing of a worker: no crash, no access outside a buffer, and no effect on other clients.

`LLAMADO_FUZZ=100000 pytest tests/rpc/test_hostile_wire.py` sends that many mutated messages, and a hundredth as many
random graphs. After a crash the file `last` in pytest's folder has the seed.
"""

from __future__ import annotations

import logging
import lzma
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guarded import GuardedBuffer, guarded
from test_rpc_graphs import CAPTURES
from tiers import first_of
from waiting import until
from wire_client import Client, layout, raw, records, request, running, wire_of

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.kernels.maths import GATE, UNARY
from llamado.ggml import graph as g
from llamado.ggml.errors import ShapeError
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op, TensorFlag
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType as T
from llamado.rpc import wire
from llamado.rpc.worker import links
from llamado.rpc.worker import server as worker_module
from llamado.rpc.worker.budgets import Budgets
from llamado.rpc.worker.server import Worker

MESSAGES = int(os.environ.get("LLAMADO_FUZZ", "1200"))
GRAPHS = max(100, MESSAGES // 100)
SIZE = 1 << 18
"""Of the buffer that strange graphs may use."""


class Tally(logging.Handler):
    """Counts of the worker's log lines by kind, and its unexpected ones."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kinds: Counter[str] = Counter()
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            self.faults.append(text + "\n" + logging.Formatter().formatException(record.exc_info))
        kind = text.split("connection closed: ", 1)[-1]
        self.kinds["".join(c for c in kind if not c.isdigit())[:28]] += 1


class Bystander:
    """A well-behaved client whose graph gives the same bytes every time."""

    def __init__(self, worker: Worker) -> None:
        self.client = Client(worker)
        rng = np.random.default_rng(0)
        w = g.new_tensor(T.Q4_1, 256, 64, name="w")
        x, at = g.new_tensor(T.F32, 256, 3, name="x"), g.new_tensor(T.I32, 3, name="at")
        y = g.mul_mat(w, g.rms_norm(x, 1e-5), name="y")
        turned = g.rope_ext(g.reshape(y, 32, 2, 3), at, None, 32, 0, 0, 1e4, 1.0, 0.0, 1.0, 0.0, 0.0)
        self.graph = Graph()
        self.result = self.graph.output("r", g.silu(g.reshape(turned, 64, 3)))
        self.places, size = layout([w, x, at, *self.graph.nodes], gap=64)
        self.ptr, self.base = self.client.alloc(size)
        weights = rng.integers(0, 256, (w.nbytes // 20, 20), np.uint8)
        weights[:, :4] = rng.normal(0, 0.1, (len(weights), 2)).astype(np.float16).view(np.uint8)
        self.data = {w: weights.tobytes(), x: rng.normal(size=768).astype(np.float32).tobytes(),
                     at: np.arange(5, 8, dtype=np.int32).tobytes()}  # fmt: skip
        for tensor, data in self.data.items():
            self.client.set(self._wire(tensor), data)
        self.client.send(request(self.graph, self.ptr, self.base, self.places))
        self.expected = self.client.get(self._wire(self.result), self.result.nbytes)
        assert np.isfinite(np.frombuffer(self.expected, np.float32)).all() and any(self.expected)
        self.rounds, self.slowest = 0, 0.0
        self.error: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _wire(self, tensor: Tensor) -> Any:
        return wire_of(tensor, self.ptr, self.base + self.places[tensor])

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                self.client.send(wire.GraphRecompute(0))
                got = self.client.get(self._wire(self.result), self.result.nbytes)
                if got != self.expected:
                    self.error = f"round {self.rounds}: another result"
                    return
                for tensor, data in self.data.items():
                    if self.client.get(self._wire(tensor), tensor.nbytes) != data:
                        self.error = f"round {self.rounds}: {tensor.name} has changed"
                        return
                self.rounds += 1
                self.slowest = max(self.slowest, time.monotonic() - began)
                time.sleep(0.002)
        except Exception as error:
            self.error = f"round {self.rounds}: {error!r}"

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(120)
        self.client.sock.close()


class Scene:
    """A worker with guarded memory, a bystander, and hostile connections."""

    def __init__(self, worker: Worker, bystander: Bystander, tally: Tally, last: Path) -> None:
        self.worker, self.bystander, self.tally, self.last = worker, bystander, tally, last

    @contextmanager
    def hostile_client(self, seed: int) -> Iterator[Client]:
        self.last.write_text(str(seed))
        assert self.bystander.error is None
        with Client(self.worker) as client:
            yield client

    def over(self, client: Client) -> None:
        """Wait until the worker has served all bytes of a connection."""
        try:
            client.sock.shutdown(socket.SHUT_WR)
            while client.sock.recv(1 << 16):
                pass
        except OSError:
            pass


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Yield a scene. Afterwards the worker's memory must be as before."""
    folder = tmp_path_factory.mktemp("hostile")
    log, tally = worker_module.log, Tally()
    log.addHandler(tally)
    log.setLevel(logging.DEBUG)
    log.propagate = False  # a hundred thousand lines do not belong in the report
    at_once, links.REFUSAL_SECONDS = links.REFUSAL_SECONDS, 0.0
    hung_up, worker_module._HUNG_UP = worker_module._HUNG_UP, 0  # hostile clients shut their sending side, then read
    buffers: list[GuardedBuffer]
    try:
        with guarded() as buffers:
            # The kernels of a fixed number of graphs are cached; those of a hundred thousand are not.
            device = CpuDevice(2, jit=Jit(folder=folder / "kernels" if "LLAMADO_FUZZ" in os.environ else None))
            with running(device, mem=256 << 20) as worker:
                worker.state.kernels = Budgets(1 << 30)
                worker.state.dialer.allowed = False  # noise must not open connections
                bystander = Bystander(worker)
                before = worker.state.devices[0].allocated
                yield Scene(worker, bystander, tally, folder / "last")
                until(lambda: worker.clients <= 1)
                assert worker.clients == 1
                assert worker.state.devices[0].allocated == before
                bystander.stop()
                assert bystander.error is None
                assert bystander.rounds > 10
            assert all(buffer.is_intact for buffer in buffers)
            device.close()
            print(f"\nbystander: {bystander.rounds} rounds, the slowest {bystander.slowest:.2f} s")
            print(f"kernels compiled: {device.jit.compiled}; errors of hostile clients:")
            for kind, n in tally.kinds.most_common(40):
                print(f"{n:8} {kind}")
    finally:
        log.removeHandler(tally)
        log.setLevel(logging.NOTSET)
        log.propagate = True
        links.REFUSAL_SECONDS = at_once
        worker_module._HUNG_UP = hung_up
    assert tally.faults == []


# --- messages ---------------------------------------------------------------------------------------------------------

COMMANDS = np.array([*wire.Command, *(max(wire.Command) + i for i in (1, 2)), 18, 19])
INTERESTING = [
    0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 1 << 16, SIZE - 1, SIZE, SIZE + 1,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 64, (1 << 64) - 1,
]  # fmt: skip


def templates(ptr: int, base: int) -> list[bytes]:
    """Return one valid message of each command."""
    tensor, half = raw(ptr, base, SIZE), raw(ptr, base + 64, 1000)
    a, b = g.new_tensor(T.F32, 32, 4, name="a"), g.new_tensor(T.F32, 32, 4, name="b")
    ids, w = g.new_tensor(T.I32, 4, name="ids"), g.new_tensor(T.F16, 32, 8, name="w")
    graph = Graph()
    graph.output("x", g.add(g.mul(g.rms_norm(a, 1e-5), b), b))
    graph.output("y", g.mul_mat(w, a))
    graph.output("z", g.get_rows(w, ids))
    graph.output("s", g.soft_max_ext(a, None, 1.0))
    places, _ = layout([a, b, ids, w, *graph.nodes], gap=64)
    compute = request(graph, ptr, base, places)
    requests = [
        wire.Hello(), wire.DeviceCount(), wire.AllocBuffer(0, 1000), wire.GetAlignment(0), wire.GetMaxSize(0),
        wire.GetDeviceMemory(0), wire.GraphRecompute(0), wire.BufferGetBase(ptr), wire.FreeBuffer(ptr),
        wire.BufferClear(ptr, 1), wire.InitTensor(half), wire.SetTensorHash(half, 0, 1),
        wire.GetTensor(tensor, 0, 1000), wire.CopyTensor(half, tensor), wire.MemsetTensor(half, 1, 2, 3),
        wire.GetAllocSize(0, half, (half,) * 10), wire.OpenInlet(), wire.ConnectNext(bytes(16), b"127.0.0.1:1"),
        wire.Attach(bytes(16)), wire.Push(half, 1, 1000, 1), wire.Await(half, 1, 1000, 1), wire.CloseInlet(bytes(16)),
    ]  # fmt: skip
    plain = [wire.write_request(r) for r in requests]
    sets = [wire.write_request(wire.SetTensor(half, flag, 5, 100)) + bytes(100) for flag in (0, 1)]
    sets += [wire.write_request(wire.Deliver(1, 2, 100)) + bytes(100)]
    return plain + sets + [wire.write_request(compute)] * 8


def mutate(message: bytes, rng: np.random.Generator, ptr: int, base: int) -> bytes:
    """Return the message with a fault, most often a wrong number."""
    data = bytearray(message)
    values = [*INTERESTING, ptr, ptr + 1, base, base - 1, base + SIZE, base + SIZE - 1, base + int(rng.integers(SIZE))]
    for _ in range(int(rng.integers(1, 4))):
        kind = rng.integers(0, 12)
        at = int(rng.integers(0, max(1, len(data))))
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data += rng.integers(0, 256, int(rng.integers(1, 400)), np.uint8).tobytes()
        elif kind == 2 and data:
            data[at] = int(rng.integers(256))
        elif kind == 3:
            data[:9] = struct.pack("<BQ", rng.choice(COMMANDS), int(rng.choice(np.array(INTERESTING, np.uint64))))
        else:
            form = "<I" if kind % 2 else "<Q"
            size = struct.calcsize(form)
            if len(data) >= 9 + size:
                at = 9 + (at - 9) // 4 * 4 % (len(data) - 8 - size)
                value = values[int(rng.integers(len(values)))]
                struct.pack_into(form, data, at, value % (1 << 8 * size))
    return bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("messages", first_of([MESSAGES // 3, MESSAGES]))
def test_mutated_messages(scene: Scene, messages: int) -> None:
    sent = seed = 0
    while sent < messages:
        rng = np.random.default_rng([1, seed])
        with scene.hostile_client(seed) as client:
            ptr, base = client.alloc(SIZE)
            choice = templates(ptr, base)
            try:
                for _ in range(int(rng.integers(1, 5))):
                    client.sock.sendall(mutate(choice[int(rng.integers(len(choice)))], rng, ptr, base))
                    sent += 1
            except OSError:
                pass  # the worker has had enough
            scene.over(client)
        seed += 1
    print(f"\n{sent} messages over {seed} connections")


# --- graphs -----------------------------------------------------------------------------------------------------------

TYPES = [T.F32, T.F32, T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q4_K, T.Q6_K, T.I32, T.I64, T.I8]


def random_graph(rng: np.random.Generator) -> tuple[Graph, list[Tensor]]:
    """Return a legal graph of random operations over small tensors, and its inputs."""
    leafs: list[Tensor] = []

    def leaf(type_: T, *ne: int) -> Tensor:
        leafs.append(g.new_tensor(type_, *ne, name=f"leaf {len(leafs)}"))
        return leafs[-1]

    def pick(choice: list[Any]) -> Any:
        return choice[int(rng.integers(len(choice)))]

    n, m = int(rng.choice([32, 64, 96, 256, 257])), int(rng.integers(1, 12))
    values = [leaf(T.F32, n, m), leaf(T.F32, n, m)]
    graph = Graph()
    for _ in range(int(rng.integers(1, 14))):
        x = pick(values)
        try:
            match int(rng.integers(0, 21)):
                case 0:
                    y = g.add(x, pick([*values, leaf(T.F32, x.ne[0], 1)]))
                case 1:
                    y = g.mul(x, pick([*values, leaf(T.F32, x.ne[0], 1)]))
                case 2:
                    y = pick([g.rms_norm, g.norm, g.l2_norm])(x, 1e-6)
                case 3:
                    y = g.scale(x, float(rng.normal()))
                case 4:
                    y = g.unary(x, pick(list(UNARY)))
                case 5:
                    y = g.mul_mat(leaf(pick(TYPES[:10]), x.ne[0], int(rng.integers(1, 40))), x)
                case 6:
                    y = g.get_rows(leaf(pick(TYPES[:-1]), x.ne[0], 20), leaf(T.I32, x.ne[1]))
                case 7:
                    y = g.set_rows(leaf(pick(TYPES[:8]), x.ne[0], 20), x, leaf(pick([T.I32, T.I64]), x.ne[1]))
                case 8:
                    y = g.soft_max_ext(x, pick([None, leaf(pick([T.F16, T.F32]), *x.ne)]), 0.5)
                case 9:
                    y = g.cont(g.transpose(x))
                case 10:
                    y = g.cpy(x, leaf(pick([T.F32, T.F16, T.BF16, T.Q8_0]), *x.ne))
                case 11:
                    heads = 2 if x.ne[0] % 4 == 0 else 1
                    y = g.reshape(x, x.ne[0] // heads, heads, x.ne[1])
                    d = y.ne[0] // 2 * 2
                    y = g.rope_ext(y, leaf(T.I32, x.ne[1]), None, d, pick([0, 2]), 0, 1e4, 1, 0, 1, 0, 0)
                    y = g.reshape(y, x.ne[0], x.ne[1])
                case 12:
                    y = g.glu_split(x, pick(values), pick(list(GATE)))
                case 13:
                    q = leaf(T.F32, 64, x.ne[1], 4)
                    kv = [leaf(pick([T.F16, T.F32, T.Q8_0]), 64, 32, 2) for _ in range(2)]
                    y = g.flash_attn_ext(q, *kv, pick([None, leaf(T.F16, 32, x.ne[1])]), 0.1)
                case 14:
                    y = g.view_2d(x, x.ne[0] // 2, x.ne[1], x.nb[1], 4 * int(rng.integers(0, x.ne[0] // 2)))
                case 15:
                    y = g.cast(x, pick([T.F16, T.F32, T.BF16]))
                case 16:
                    y = g.permute(x, *[int(i) for i in rng.permutation(4)])
                case 17:
                    y = g.mul_mat(pick(values), x)
                case 18:
                    y = g.concat(x, pick(values), int(rng.integers(2)))
                case 19:
                    y = pick([g.sum_rows, g.sum_all, g.mean, g.argmax, g.argsort, g.cumsum, g.sqr, g.log])(x)
                case _:
                    y = g.sub(x, pick(values))
        except (ShapeError, ValueError, ZeroDivisionError):
            continue
        graph.output(str(len(graph.nodes)), y)
        if y.type is T.F32 and y.ne[2:] == (1, 1):
            values.append(y)
    if not graph.nodes:
        graph.output("0", g.scale(values[0], 1.0))
    used = {s for node in graph.nodes for s in (*node.src, node.view_src) if s is not None}
    return graph, [leaf for leaf in leafs if leaf in used]


def spoil(tensors: Any, nodes: Any, rng: np.random.Generator, base: int, size: int) -> None:
    """Change fields of some tensors in place."""
    small = [0, 1, 2, 3, 4, 5, 8, 16, 18, 20, 32, 33, 64, 100, 128, 256, 1000, 4096]
    for _ in range(int(rng.choice([0, 1, 1, 1, 2, 3]))):
        t = tensors[int(rng.integers(len(tensors)))]
        other = tensors[int(rng.integers(len(tensors)))]
        d = int(rng.integers(4))
        number = int(rng.choice(small)) if rng.integers(4) else int(rng.choice(np.array(INTERESTING, np.uint64)))
        match int(rng.integers(0, 14)):
            case 0:
                t["ne"][d] = number % (1 << 32)
            case 1:
                t["nb"][d] = number % (1 << 32)
            case 2:
                t["data"] = base + int(rng.integers(0, size)) // 4 * 4
            case 3:
                t["data"] = (base + size - number) % (1 << 64)
            case 4:
                t["src"][int(rng.integers(4))] = other["id"]
            case 5:
                t["view_src"], t["view_offs"] = other["id"], number
            case 6:
                t["type"] = int(rng.choice([*TYPES, 99]))
            case 7:
                t["op"] = int(rng.choice(list(Op)))
            case 8:
                params = bytearray(bytes(t["op_params"]))
                struct.pack_into("<I", params, 4 * int(rng.integers(16)), int(rng.integers(1 << 32)))
                t["op_params"] = np.void(bytes(params))
            case 9:
                t["flags"] = int(rng.choice([0, int(TensorFlag.COMPUTE), 255]))
            case 10:
                t["buffer"], t["data"] = 0, 0
            case 11:
                t["ne"], t["nb"] = other["ne"], other["nb"]
            case 12:
                t["use_count"] = number % (1 << 31)
            case 13:
                t["data"] = other["data"]


def indices(client: Client, ptr: int, base: int, size: int, rng: np.random.Generator) -> None:
    """Fill a buffer with random bytes, row numbers and positions of every size, and NaN."""
    data = rng.integers(0, 256, size, np.uint8)
    if rng.integers(2):
        data.view(np.int32)[:] = rng.integers(-3, 40, size // 4)
    client.set(raw(ptr, base, size), data.tobytes())


@pytest.mark.full
def test_random_graphs(scene: Scene) -> None:
    computed = 0
    for seed in range(GRAPHS):
        rng = np.random.default_rng([2, seed])
        with scene.hostile_client(seed) as client:
            graph, leafs = random_graph(rng)
            loose = rng.random() < 0.3
            places, size = layout([*leafs, *(t for t in graph.nodes if t.view_src is None)], gap=0)
            if loose:
                places = {t: at for t, at in places.items() if t in leafs or rng.random() < 0.5}
            size = max(size + int(rng.integers(0, 64)), SIZE)
            ptr, base = client.alloc(size)
            indices(client, ptr, base, size // 4 * 4, rng)
            nodes, tensors = records(graph, ptr, base, places)
            spoil(tensors, nodes, rng, base, size)
            try:
                for _ in range(2):
                    client.send(wire.graph_request(0, nodes, tensors))
                client.send(wire.GraphRecompute(0))
                computed += client.number(wire.DeviceCount())
            except OSError:
                pass
            scene.over(client)
    print(f"\n{GRAPHS} random graphs, {computed} of them computed")
    assert computed > GRAPHS // 10


@pytest.mark.full
def test_real_graphs_with_changed_numbers(scene: Scene) -> None:
    computed = 0
    n = max(8, GRAPHS // 20)
    for seed in range(n):
        rng = np.random.default_rng([3, seed])
        original = wire.read_graph(lzma.decompress(CAPTURES[seed % len(CAPTURES)].read_bytes()))
        with scene.hostile_client(seed) as client:
            moved, regions = move(client, original)
            tensors = moved.tensors.copy()
            ptr = int(rng.choice(list(regions)))
            spoil(tensors, moved.nodes, rng, *regions[ptr])
            try:
                client.send(wire.graph_request(0, moved.nodes, tensors))
                computed += client.number(wire.DeviceCount())
            except OSError:
                pass
            scene.over(client)
    print(f"\n{n} spoilt graphs of a real llama-server, {computed} of them computed")
    assert computed


def move(client: Client, graph: wire.GraphCompute) -> tuple[wire.GraphCompute, dict[int, tuple[int, int]]]:
    """Move a captured graph to buffers of ours, sharing weights so that they fit. Returns base and size by ptr."""
    tensors = graph.tensors.copy()
    regions = {}
    for ptr in np.unique(graph.tensors["buffer"]).tolist():
        if not ptr:
            continue
        mine = graph.tensors["buffer"] == ptr
        data = graph.tensors["data"][mine]
        ends = data + (graph.tensors["ne"][mine, 3].clip(1) * graph.tensors["nb"][mine, 3].astype(np.uint64))
        size = int(ends.max() - data.min())
        if size > 100 << 20:  # weights: all at the same place
            size = 32 << 20
            tensors["data"][mine] = data.min()
            data = tensors["data"][mine]
        new, base = client.alloc(size)
        tensors["buffer"][mine] = new
        tensors["data"][mine] = tensors["data"][mine] - data.min() + np.uint64(base)
        regions[new] = (base, size)
    return wire.graph_request(0, graph.nodes, tensors), regions
