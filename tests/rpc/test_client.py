"""RemoteDevice against a scripted worker: requests on the wire, and detection of failures."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_worker import Hang, ScriptedWorker
from waiting import until

from llamado.devices.device import DeviceError, DeviceLost
from llamado.devices.split.measure import figures_of
from llamado.ggml import Graph, TensorFlag
from llamado.ggml import graph as g
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType as T
from llamado.rpc import wire
from llamado.rpc.client import device as client
from llamado.rpc.client import upload
from llamado.rpc.client.connection import VersionMismatch, WorkerConnection
from llamado.rpc.client.device import RemoteDevice, connect
from llamado.rpc.hashing import fnv1a
from llamado.rpc.known_hashes import KnownHashes
from llamado.rpc.transport import ConnectError

Before = Callable[[wire.Request, int], bytes | None]


@contextmanager
def device_of(worker: ScriptedWorker, **options: Any) -> Iterator[RemoteDevice]:
    with worker:
        device = connect(worker.endpoint, **options)[0]
        try:
            yield device
        finally:
            device.close()


def numbers(n: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)


def held(worker: ScriptedWorker, device: RemoteDevice, tensor: Tensor) -> bytes:
    """Return the bytes of a tensor on the worker."""
    return device.read(tensor, 0, tensor.nbytes).result(60).tobytes()


def when(kind: type, action: Callable[[], bytes | None]) -> Before:
    """Return a callback that acts on requests of one kind instead of a response."""
    return lambda request, _: action() if isinstance(request, kind) else None


def close_it() -> None:
    raise EOFError


def hang() -> None:
    raise Hang


# --- connecting -------------------------------------------------------------------------------------------------------


def test_devices_share_a_connection_and_are_numbered() -> None:
    with ScriptedWorker(devices=3) as worker:
        devices = connect(str(worker.endpoint), first_number=2)
        assert [d.name for d in devices] == [f"RPC{i}[{worker.endpoint}]" for i in (2, 3, 4)]
        assert not devices[0].is_ours and devices[0].endpoint == worker.endpoint
        assert devices[1].memory() == (1 << 30, 1 << 30)
        assert 0 < devices[2].round_trip() < 10
        devices[0].place([g.new_tensor(T.I8, 100)])
        assert worker.buffers
        devices[0].close()
        devices[0].close()
        assert devices[1].memory() == (1 << 30, 1 << 30)
        for device in devices[1:]:
            device.close()
        assert worker.connections == 1


@pytest.mark.parametrize("version", [(9, 0, 0), (6, 9, 9), (7, 1, 0), (8, 1, 0)])
def test_other_versions_are_refused(version: tuple[int, int, int]) -> None:
    with (
        ScriptedWorker(version=version) as worker,
        pytest.raises(VersionMismatch, match=rf"{'.'.join(map(str, version))}.*7\.0\.0 and 8\.0\.0"),
    ):
        connect(worker.endpoint)


def test_another_patch_version_is_accepted() -> None:
    with device_of(ScriptedWorker(version=(7, 0, 9))) as device:
        assert device.lost is None


def test_a_closed_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectError, match=f"127.0.0.1:{port}.*is a worker running"):
        connect(f"127.0.0.1:{port}")


def test_a_worker_that_serves_another_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConnectError, match="does not greet"):
            connect(f"127.0.0.1:{port}", timeout=0.2)


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 100, b"\xff" * 8])
def test_an_invalid_greeting(greeting: bytes) -> None:
    with (
        ScriptedWorker(before=when(wire.Hello, lambda: greeting)) as worker,
        pytest.raises(ConnectError, match="protocol"),
    ):
        connect(worker.endpoint)


def test_a_worker_without_devices() -> None:
    with ScriptedWorker(devices=0) as worker, pytest.raises(DeviceError, match="no devices"):
        connect(worker.endpoint)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_placed_tensors_are_aligned_zero_and_apart() -> None:
    worker = ScriptedWorker(alignment=128)
    with device_of(worker) as device:
        tensors = [g.new_tensor(T.F32, n, name=f"t{n}") for n in (1, 40, 7)]
        (buffer,) = device.place(tensors)
        assert [t.offset for t in tensors] == [0, 128, 384]
        assert all(t.buffer is buffer for t in tensors)
        assert all(held(worker, device, t) == bytes(t.nbytes) for t in tensors)
        for i, tensor in enumerate(tensors):
            device.write(tensor, np.full(tensor.nbytes, i + 1, np.uint8))
        assert [set(held(worker, device, t)) for t in tensors] == [{1}, {2}, {3}]
        buffer.free()
        buffer.free()
        with pytest.raises(DeviceError, match="is not on RPC0"):
            device.read(tensors[0], 0, 4)
        device.memory()
        assert not worker.buffers


def test_buffers_stay_below_the_worker_s_largest_size() -> None:
    worker = ScriptedWorker(max_size=1000)
    with device_of(worker) as device:
        tensors = [g.new_tensor(T.F32, 100, name=f"t{i}") for i in range(5)]
        assert len(device.place(tensors)) == 3
        assert all(len(memory) <= 1000 for _, memory in worker.buffers.values())
        with pytest.raises(DeviceError, match="tensor big"):
            device.place([g.new_tensor(T.F32, 251, name="big")])


@pytest.mark.parametrize("size", [2_000_000, 100_000_000])
def test_a_full_worker_reports_the_missing_bytes(size: int) -> None:
    worker = ScriptedWorker(memory=1_500_000, max_size=1_000_000 if size < 10_000_000 else 1 << 40)
    with device_of(worker) as device:
        tensors = [g.new_tensor(T.I8, size // 4) for _ in range(4)]
        with pytest.raises(DeviceError, match=rf"RPC0.* lacks {(size - 1_500_000) / 1e6:,.1f} MB"):
            device.place(tensors)
        assert device.memory()[0] == 1_500_000
        assert device.lost is None


def test_views_are_not_placed() -> None:
    with device_of(ScriptedWorker()) as device, pytest.raises(DeviceError, match="view"):
        device.place([g.view_1d(g.new_tensor(T.F32, 4), 2)])


@pytest.mark.parametrize("own", [False, True])
def test_alloc_sizes_are_requested_for_tensors_that_may_be_padded(own: bool) -> None:
    worker = ScriptedWorker(own=own)
    with device_of(worker) as device:
        odd, even, plain = g.new_tensor(T.Q8_0, 96, 4), g.new_tensor(T.Q8_0, 512, 4), g.new_tensor(T.F32, 96)
        device.place([odd, even, plain, g.new_tensor(T.Q8_0, 96, 4)])
        device.memory()
        assert len(worker.of(wire.GetAllocSize)) == (0 if own else 1)  # one request for equal shapes
        assert len(worker.of(wire.InitTensor)) == (0 if own else 2)
        assert even.offset - odd.offset >= (odd.nbytes if own else 96 * 4 * 4 + 100)


# --- writing and reading ----------------------------------------------------------------------------------------------


def input_tensor(name: str, type: T, *ne: int) -> Tensor:
    return Graph().input(name, type, *ne)


def test_only_changed_bytes_of_an_input_are_sent() -> None:
    worker = ScriptedWorker()
    with device_of(worker) as device:
        mask, weight = input_tensor("mask", T.I8, 1000), g.new_tensor(T.I8, 1000, name="w")
        device.place([mask, weight])
        data = numbers(1000)
        for _ in range(3):
            device.write(mask, data)
            device.write(weight, data)
        data = data.copy()
        data[400:402] += 1
        device.write(mask, data)
        device.write(mask, data[600:] + 1, 600)
        data[600:] += 1
        assert held(worker, device, mask) == data.tobytes()
        sent = [(r.tensor.name, r.offset, r.size) for r in worker.of(wire.SetTensor)]
        assert [s for s in sent if s[0] == b"mask"] == [(b"mask", 0, 1000), (b"mask", 400, 2), (b"mask", 600, 400)]
        assert sum(s[0] == b"w" for s in sent) == 3


@pytest.mark.slow
def test_inputs_of_several_graphs_in_one_place() -> None:
    worker = ScriptedWorker()
    with device_of(worker) as device:
        place = g.new_tensor(T.I8, 100)
        device.place([place])
        short, long, late = (input_tensor("x", T.I8, n) for n in (10, 100, 50))
        for tensor, at in ((short, 0), (long, 0), (late, 50)):
            tensor.buffer, tensor.offset = place.buffer, at
        rng = np.random.default_rng(0)
        expected = np.zeros(100, np.uint8)
        for _ in range(300):
            tensor = (short, long, late, place)[rng.integers(4)]
            offset = int(rng.integers(tensor.nbytes))
            data = rng.integers(0, 2, rng.integers(tensor.nbytes - offset + 1)).astype(np.uint8)
            at = tensor.offset + offset
            expected[at : at + data.nbytes] = data
            device.write(tensor, data, offset)
            if rng.random() < 0.2:
                device.copy(g.view_1d(place, 20, 0), g.view_1d(place, 20, 30))
                expected[30:50] = expected[:20]
            if rng.random() < 0.3:
                assert held(worker, device, place) == expected.tobytes()
        assert held(worker, device, place) == expected.tobytes()


def test_an_input_that_a_graph_writes_to_is_sent_whole() -> None:
    worker = ScriptedWorker()
    with device_of(worker) as device:
        graph = Graph()
        x, y = graph.input("x", T.F32, 8), graph.input("y", T.F32, 8)
        device.place([x, y])
        graph.expand(g.cpy(x, y))
        data = np.arange(8, dtype=np.float32)
        for _ in range(3):
            device.write(x, data)
            device.write(y, data)
            device.submit(graph)
        device.memory()
        names = [r.tensor.name for r in worker.of(wire.SetTensor)]
        # before the graph is prepared, y is like any input
        assert (names.count(b"x"), names.count(b"y")) == (1, 3)


def test_data_may_change_once_written() -> None:
    worker = ScriptedWorker()
    with device_of(worker) as device:
        for n in (100, 100_000):
            tensor = g.new_tensor(T.I8, n)
            device.place([tensor])
            data = numbers(n)
            right = data.tobytes()
            device.write(tensor, data)
            data[:] = 0
            assert held(worker, device, tensor) == right


@pytest.mark.parametrize(("offset", "n"), [(0, 17), (1, 16), (-1, 1)])
def test_data_that_does_not_fit_is_rejected(offset: int, n: int) -> None:
    with device_of(ScriptedWorker()) as device:
        tensor = g.new_tensor(T.I8, 16)
        device.place([tensor])
        with pytest.raises(DeviceError):
            device.write(tensor, np.zeros(n, np.uint8), offset)
        with pytest.raises(DeviceError):
            device.read(tensor, offset, n)


def test_tensors_of_other_devices_are_rejected() -> None:
    with device_of(ScriptedWorker()) as one, device_of(ScriptedWorker()) as other:
        tensor = g.new_tensor(T.I8, 16)
        with pytest.raises(DeviceError, match="no memory"):
            one.write(tensor, np.zeros(4, np.uint8))
        other.place([tensor])
        with pytest.raises(DeviceError, match="is not on RPC0"):
            one.read(tensor, 0, 4)


def test_reads_are_futures_in_order() -> None:
    go = threading.Event()

    def slow(request: wire.Request, _: int) -> None:
        if isinstance(request, wire.GetTensor):
            go.wait(60)

    with device_of(ScriptedWorker(before=slow)) as device:
        tensor = g.new_tensor(T.I8, 300_000)
        device.place([tensor])
        data = numbers(300_000)
        device.write(tensor, data)
        futures = [device.read(tensor, at, 100_000) for at in range(0, 300_000, 100_000)]
        device.write(tensor, np.zeros(300_000, np.uint8))
        empty = device.read(tensor, 5, 0)
        assert not any(f.done() for f in futures) and empty.result().nbytes == 0
        go.set()
        assert b"".join(f.result(60).tobytes() for f in futures) == data.tobytes()
        assert not device.read(tensor, 0, 300_000).result(60).any()


def test_a_batch_is_sent_at_its_end() -> None:
    worker = ScriptedWorker()
    with device_of(worker) as device:
        tensor = g.new_tensor(T.I8, 16)
        device.place([tensor])
        device.read(tensor, 0, 16).result()  # so all that went before has arrived
        before = len(worker.asked)
        with device.batch():
            device.write(tensor, np.ones(16, np.uint8))
            future = device.read(tensor, 0, 16)
            time.sleep(0.05)
            assert len(worker.asked) == before
        assert future.result(60).tobytes() == b"\1" * 16


def test_many_threads() -> None:
    worker = ScriptedWorker()
    with device_of(worker) as device:
        tensors = [input_tensor(f"t{i}", T.I8, 5000) for i in range(6)]
        device.place(tensors)

        def work(i: int) -> bool:
            good = True
            for step in range(40):
                data = numbers(5000, 1000 * i + step)
                device.write(tensors[i], data)
                good &= device.read(tensors[i], 0, 5000).result(60).tobytes() == data.tobytes()
            return good

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(work, range(6)))


# --- copying ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.booleans(), st.booleans())
def test_overlapping_copies(source: int, target: int, n: int, own: bool, copies: bool) -> None:
    """The result is that of a copy through other memory. ggml's workers never get a copy that overlaps itself."""
    worker = ScriptedWorker(own=own, copies=own or copies)
    with device_of(worker) as device:
        whole = g.new_tensor(T.I8, 600)
        device.place([whole])
        data = numbers(600)
        device.write(whole, data)
        device.copy(g.view_1d(whole, n, source), g.view_1d(whole, n, target))
        data[target : target + n] = data[source : source + n].copy()
        assert held(worker, device, whole) == data.tobytes()
        assert device.lost is None


def test_a_copy_over_a_short_distance_goes_through_other_memory() -> None:
    worker = ScriptedWorker()
    with device_of(worker) as device:
        whole = g.new_tensor(T.I8, 100_001)
        device.place([whole])
        data = numbers(100_001)
        device.write(whole, data)
        device.copy(g.view_1d(whole, 100_000, 0), g.view_1d(whole, 100_000, 1))
        assert held(worker, device, whole) == data[:1].tobytes() + data[:-1].tobytes()
        assert len(worker.of(wire.CopyTensor)) == 2


def test_copies_must_match() -> None:
    with device_of(ScriptedWorker()) as device:
        a, b = g.new_tensor(T.I8, 10), g.new_tensor(T.I8, 11)
        device.place([a, b])
        with pytest.raises(DeviceError, match="10 bytes"):
            device.copy(a, b)


def test_the_next_call_raises_the_error_of_a_copy() -> None:
    worker = ScriptedWorker()
    with device_of(worker) as device:
        a, b = g.new_tensor(T.I8, 10), g.new_tensor(T.I8, 10)
        device.place([a, b])
        device.copy(a, b)
        worker.copies = False
        device.copy(a, b)
        device.memory()
        with pytest.raises(DeviceError, match="refused to copy"):
            device.copy(a, b)
        device.write(a, np.ones(10, np.uint8))


# --- graphs -----------------------------------------------------------------------------------------------------------


def sums(n: int) -> tuple[Graph, list[Tensor]]:
    graph = Graph()
    x = graph.input("x", T.F32, n)
    y = x
    for _ in range(5):
        y = g.add(y, x)
    graph.output("y", y)
    return graph, [x, y]


@pytest.mark.parametrize(("version", "commands"), [((7, 0, 0), "crcrcrrcr"), ((8, 0, 0), "crcrrrrcr")])
def test_a_known_graph_is_sent_by_name(version: tuple[int, int, int], commands: str) -> None:
    """In 7.0 the device's last graph, in 8.0 any."""
    worker = ScriptedWorker(version=version)
    with device_of(worker) as device:
        (one, tensors), (two, more) = sums(4), sums(4)
        buffers = device.place([*tensors, *more])
        for graph in (one, one, two, two, one, one):
            device.submit(graph)
        spare = device.place([g.new_tensor(T.F32, 4)])[0]
        device.submit(one)
        spare.free()  # a worker of ggml forgets its graph with any buffer
        device.submit(one)
        device.submit(one)
        device.submit(Graph())
        device.memory()
        kinds = [r for r in worker.asked if isinstance(r, wire.GraphCompute | wire.GraphRecompute)]
        assert "".join("c" if isinstance(r, wire.GraphCompute) else "r" for r in kinds) == commands
        graphs = worker.of(wire.GraphCompute)
        assert graphs[0].payload == graphs[2].payload
        buffers[0].free()
        with pytest.raises(DeviceError):
            device.submit(one)


def test_a_freed_buffer_makes_a_worker_forget_all_graphs() -> None:
    """This includes graphs of its other devices, and a buffer whose allocation failed."""
    with ScriptedWorker(devices=2) as worker:
        one, two = connect(worker.endpoint)
        graph, tensors = sums(4)
        two.place(tensors)
        two.submit(graph)
        two.submit(graph)
        (spare,) = one.place([g.new_tensor(T.F32, 4)])
        two.submit(graph)
        spare.free()
        two.submit(graph)
        two.submit(graph)
        two.memory()
        kinds = [type(r) for r in worker.asked if isinstance(r, wire.GraphCompute | wire.GraphRecompute)]
        c, r = wire.GraphCompute, wire.GraphRecompute
        assert kinds == [c, r, r, c, r]
        for device in (one, two):
            device.close()


def test_devices_of_one_worker_have_graphs_of_their_own() -> None:
    with ScriptedWorker(devices=2) as worker:
        devices = connect(worker.endpoint)
        graphs = [sums(4) for _ in devices]
        for device, (_, tensors) in zip(devices, graphs, strict=True):
            device.place(tensors)
        for _ in range(2):
            for device, (graph, _) in zip(devices, graphs, strict=True):
                device.submit(graph)
        devices[0].memory()
        assert [r.device for r in worker.of(wire.GraphCompute)] == [0, 1]
        assert [r.device for r in worker.of(wire.GraphRecompute)] == [0, 1]
        for device in devices:
            device.close()


@pytest.mark.parametrize("own", [False, True])
def test_activations_lie_in_a_buffer_of_the_client_unless_the_worker_is_ours(own: bool) -> None:
    worker = ScriptedWorker(own=own, version=(7, 0, 0))
    with device_of(worker) as device:
        small, tensors = sums(4)
        device.place(tensors)
        device.submit(small)
        device.memory()
        (request,) = worker.of(wire.GraphCompute)
        by_id = {int(t["id"]): t for t in request.tensors}
        inner = [by_id[int(i)] for i in request.nodes[:-1]]
        assert all((t["buffer"] == 0) == own and (t["data"] == 0) == own for t in inner)
        assert by_id[int(request.nodes[-1])]["buffer"] == tensors[1].buffer.ptr
        assert [t["use_count"] for t in inner] == [1] * 4
        assert {int(t["flags"]) for t in inner} == {int(TensorFlag.COMPUTE)}
        # A larger graph gets a larger buffer, and the small one goes on with that. Our worker still has the small one.
        large, more = sums(4000)
        device.place(more)
        device.submit(large)
        device.submit(small)
        device.memory()
        again = worker.of(wire.GraphCompute)[-1]
        live = {int(p) for p in worker.buffers}
        assert {int(t["buffer"]) for t in again.tensors} <= live | ({0} if own else set())
        if own:
            assert [r.uid for r in worker.of(wire.GraphRecompute)] == [request.uid]
        else:
            assert again.payload != request.payload and len(worker.of(wire.GraphCompute)) == 3


def test_outputs_must_be_bound() -> None:
    with device_of(ScriptedWorker()) as device:
        graph, (x, _) = sums(4)
        device.place([x])
        with pytest.raises(DeviceError, match="no memory"):
            device.submit(graph)


def test_data_without_memory_is_an_error() -> None:
    with device_of(ScriptedWorker(own=True)) as device:
        graph, (_, y) = sums(4)
        device.place([y])
        with pytest.raises(DeviceError, match="tensor x"):
            device.submit(graph)


# --- weights ----------------------------------------------------------------------------------------------------------


def weights(*sizes: int) -> list[tuple[Tensor, Any]]:
    return [(g.new_tensor(T.I8, n, name=f"w{i}"), numbers(n, i)) for i, n in enumerate(sizes)]


@pytest.mark.parametrize("own", [False, True])
def test_weights_are_tried_by_hash(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HASH_THRESHOLD", 1000)
    monkeypatch.setattr(client, "OWN_HASH_THRESHOLD", 1000)
    worker = ScriptedWorker(own=own)
    sizes = (5000, 900, 1000, 1001, 70_000, 3000, 3001, 3002)
    large = [f"w{i}" for i, n in enumerate(sizes) if n > 1000]
    hashes: dict[str, int] = {}
    with device_of(worker, hashes=hashes) as device:
        for turn in range(3):
            if turn == 2:
                worker.cache.pop(hashes["w4"])
                hashes.pop("w3")
            worker.asked.clear()
            pairs = weights(*sizes)
            done: list[int] = []
            buffers = device.load(pairs, done.append)
            assert sum(done) == sum(sizes)
            assert all(held(worker, device, t) == data.tobytes() for t, data in pairs)
            assert hashes == {t.name: fnv1a(data) for t, data in pairs if t.name in large}
            sent = {r.tensor.name.decode(): r.cache_flag for r in worker.of(wire.SetTensor)}
            asked = {r.tensor.name.decode() for r in worker.of(wire.SetTensorHash)}
            new = [large, [], ["w4"]][turn]
            assert asked == set(large)
            assert sent == {"w1": 0, "w2": 0} | dict.fromkeys(new, 1)
            for buffer in buffers:
                buffer.free()


def test_only_unknown_hashes_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HASH_THRESHOLD", 1000)
    monkeypatch.setattr(client, "OWN_HASH_THRESHOLD", 1000)
    monkeypatch.setattr(upload, "fnv1a_many", lambda arrays: pytest.fail("hashed again"))
    pairs = weights(2000, 3000)
    with device_of(ScriptedWorker(), hashes={t.name: fnv1a(data) for t, data in pairs}) as device:
        device.load(pairs)


def test_a_failed_load_frees_its_memory() -> None:
    with device_of(ScriptedWorker()) as device:
        pairs = weights(100)
        with pytest.raises(DeviceError, match="99 bytes"):
            device.load([(pairs[0][0], pairs[0][1][1:])])

        def stop(_: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            device.load(weights(100), stop)
        assert device.memory()[0] == 1 << 30


def test_known_hashes_are_dropped_when_a_file_changes(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"one")
    known = KnownHashes([model], tmp_path / "hashes")
    assert not known
    known["a"] = 0xFFFF_FFFF_FFFF_FFFF
    known.save()
    again = KnownHashes([model], tmp_path / "hashes")
    assert dict(again) == {"a": 0xFFFF_FFFF_FFFF_FFFF}
    del again["a"]
    assert "a" not in again
    model.write_bytes(b"other")
    assert not KnownHashes([model], tmp_path / "hashes")
    for text in ("{", "[]", '{"a": 1}', '{"a": "x"}'):
        next((tmp_path / "hashes").iterdir()).write_text(text)
        model.write_bytes(b"one")
        assert not KnownHashes([model], tmp_path / "hashes")


# --- a worker that lies -----------------------------------------------------------------------------------------------

NUMBERS = (0, 1, 3, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
LIES: dict[type[wire.Request], Callable[[int], wire.Response]] = {
    wire.DeviceCount: lambda n: wire.Number(n % 2**32),
    wire.GetAlignment: wire.Number,
    wire.GetMaxSize: wire.Number,
    wire.GetDeviceMemory: lambda n: wire.DeviceMemory(n, n // 3),
    wire.GetAllocSize: wire.Number,
    wire.AllocBuffer: lambda n: wire.AllocResponse(n, n),
    wire.BufferGetBase: wire.Number,
    wire.CopyTensor: lambda n: wire.Number(n % 2**8),
    wire.SetTensorHash: lambda n: wire.Number(n % 2**8),
}
"""Numbers that a worker may return for each request."""


class LyingWorker(ScriptedWorker):
    """Returns false numbers, and closes connections whose later requests follow from them."""

    def _answer(self, request: wire.Request, bulk: bytes) -> bytes | None:
        try:
            return super()._answer(request, bulk)
        except (AssertionError, LookupError):
            raise EOFError from None


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", LIES, ids=lambda kind: kind.__name__)
def test_false_numbers_of_a_worker_raise_named_errors(
    kind: type[wire.Request], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_ASK_FIRST", 1)
    monkeypatch.setattr(client, "OWN_HASH_THRESHOLD", 1 << 10)
    for number in NUMBERS:
        answer = wire.write_response(wire.COMMANDS[kind], LIES[kind](number))
        worker = LyingWorker(own=own, before=when(kind, partial(bytes, answer)))
        with worker, suppress(DeviceError):
            device = connect(worker.endpoint)[0]
            try:
                for work in (_place_and_compute, _load, _copy, figures_of):
                    with suppress(DeviceError):
                        work(device)
            finally:
                device.close()


def _place_and_compute(device: RemoteDevice) -> None:
    a, b = g.new_tensor(T.F32, 33, 3), g.new_tensor(T.F32, 33, 3)
    device.place([a, b])
    graph = Graph()
    graph.output("y", y := g.mul_mat(a, b))
    device.place([y])
    device.write(a, np.ones(99, np.float32))
    device.submit(graph)
    device.read(y, 0, 4).result(60)


def _load(device: RemoteDevice) -> None:
    weight = g.new_tensor(T.F32, 1000, name="w")
    device.load([(weight, np.zeros(4000, np.uint8))])


def _copy(device: RemoteDevice) -> None:
    a, b = g.new_tensor(T.I8, 100), g.new_tensor(T.I8, 100)
    device.place([a, b])
    device.copy(a, b)
    device.copy(a, b)
    device.read(b, 0, 1).result(60)


# --- loss -------------------------------------------------------------------------------------------------------------


@contextmanager
def losing(before: Before, **options: Any) -> Iterator[tuple[RemoteDevice, Tensor, list[DeviceLost]]]:
    """Yield a device that is about to be lost, a tensor on it, and the calls of its callback."""
    worker = ScriptedWorker(own=options.pop("own", False))
    reply_timeout = options.pop("reply_timeout", None)
    with device_of(worker, **options) as device:
        tensor = g.new_tensor(T.I8, 100_000)
        device.place([tensor])
        told: list[DeviceLost] = []
        device.on_lost(told.append)
        worker.before = before
        if reply_timeout is not None:  # not before: a busy machine is not that quick to connect
            device._connection._reply_timeout = reply_timeout
        yield device, tensor, told
        until(lambda: bool(told))
        assert [error.device for error in told] == [device.name]
        assert device.lost is not None
        for call in (
            device.memory,
            lambda: device.read(tensor, 0, 1),
            lambda: device.place([g.new_tensor(T.I8, 1)]),
            device.round_trip,
        ):
            with pytest.raises(DeviceLost):
                call()
        later: list[DeviceLost] = []
        device.on_lost(later.append)
        assert len(later) == 1 and len(told) == 1


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (close_it, "closed the connection"),
        (lambda: (100_000).to_bytes(8, "little") + bytes(500), None),
        (lambda: (99_999).to_bytes(8, "little") + bytes(99_999), "protocol"),
        (lambda: b"\xff" * 20, "protocol"),
    ],
)
def test_loss_with_a_pending_response(action: Callable[[], bytes | None], why: str | None) -> None:
    with losing(when(wire.GetTensor, action)) as (device, tensor, _):
        with device.batch():
            futures = [device.read(tensor, 0, 100_000) for _ in range(3)]
        if why is None:  # the answer begins and never ends
            with pytest.raises(TimeoutError):
                futures[0].result(0.1)
            device._connection.lose("a reason")
            why = "a reason"
        for future in futures:
            with pytest.raises(DeviceLost, match=why):
                future.result(60)


def test_a_trickled_response_times_out() -> None:
    with losing(when(wire.GetTensor, lambda: (100_000).to_bytes(8, "little") + bytes(500))) as (device, tensor, _):
        future = device.read(tensor, 0, 100_000)
        until(lambda: not device._connection._reader.n_expected, "some of the bytes come")
        device._connection._awaited = device._connection._sent = -1000.0
        with pytest.raises(DeviceLost, match="it has not answered for 120 s"):
            future.result(60)


def test_a_connection_closed_in_the_middle_of_a_response() -> None:
    begun = threading.Event()

    def begin(request: wire.Request, _: int) -> bytes | None:
        if begun.is_set():
            raise EOFError
        if isinstance(request, wire.GetTensor):
            begun.set()
            return (100_000).to_bytes(8, "little") + bytes(70_000)
        return None

    with losing(begin) as (device, tensor, _):
        future = device.read(tensor, 0, 100_000)
        begun.wait(60)
        device.read(tensor, 0, 1)
        with pytest.raises(DeviceLost, match="closed the connection"):
            future.result(60)


def test_a_response_to_no_request() -> None:
    def shout(request: wire.Request, _: int) -> bytes | None:
        return b"\1" * 9 if isinstance(request, wire.SetTensor) else None

    with losing(shout) as (device, tensor, told):
        device.write(tensor, np.zeros(100_000, np.uint8))
        until(lambda: bool(told))
        assert "protocol" in str(told[0])


@pytest.mark.slow
def test_a_late_response() -> None:
    with (
        losing(when(wire.GetTensor, hang), reply_timeout=0.3) as (device, tensor, _),
        pytest.raises(DeviceLost, match="not answered for"),
    ):
        device.read(tensor, 0, 1).result(60)


@pytest.mark.slow
def test_a_worker_that_does_not_read() -> None:
    """The blocked sending thread returns, too."""
    with (
        losing(when(wire.SetTensor, hang), reply_timeout=0.3) as (device, tensor, _),
        pytest.raises(DeviceLost, match="not answered"),
    ):
        for _ in range(1000):
            device.write(tensor, np.zeros(100_000, np.uint8))


@pytest.mark.slow
def test_our_worker_gets_heartbeats() -> None:
    frozen = threading.Event()

    def freeze(request: wire.Request, connection: int) -> None:
        if frozen.is_set():
            raise Hang

    with losing(freeze, own=True, alive_timeout=1.0) as (device, tensor, told):
        assert not told
        frozen.set()
        with pytest.raises(DeviceLost, match="no sign of life"):
            device.read(tensor, 0, 1).result(60)


def test_our_worker_without_a_second_connection() -> None:
    def only_one(request: wire.Request, connection: int) -> None:
        if connection > 1:
            raise EOFError

    before = threading.active_count()
    with ScriptedWorker(own=True, before=only_one) as worker, pytest.raises(ConnectError, match="second connection"):
        connect(worker.endpoint)
    assert threading.active_count() <= before


def test_an_idle_worker_is_not_lost() -> None:
    """Time counts only while a response is pending."""
    with device_of(ScriptedWorker(own=True)) as device:
        assert device.memory()[1] == 1 << 30
        until(lambda: device._connection.stalled_seconds() == 0.0)


def test_closing_is_not_a_loss() -> None:
    told: list[DeviceLost] = []
    worker = ScriptedWorker(own=True)
    with device_of(worker) as device:
        device.on_lost(told.append)
        tensor = g.new_tensor(T.I8, 4)
        buffers = device.place([tensor])
        device.close()
        assert not told
        buffers[0].free()
        with pytest.raises(DeviceLost, match="was closed"):
            device.memory()


def test_closing_does_not_wait_for_a_frozen_worker() -> None:
    with ScriptedWorker(before=when(wire.SetTensor, hang)) as worker:
        device = connect(worker.endpoint)[0]
        tensor = g.new_tensor(T.I8, 10_000_000)
        device.place([tensor])

        def write() -> None:
            with pytest.raises(DeviceLost):
                for _ in range(10):
                    device.write(tensor, np.zeros(10_000_000, np.uint8))

        thread = threading.Thread(target=write)
        thread.start()
        time.sleep(0.1)
        device.close()
        thread.join(60)
        assert not thread.is_alive()


def test_no_threads_are_left() -> None:
    before = threading.active_count()
    with ScriptedWorker(own=True) as worker:
        for _ in range(3):
            connect(worker.endpoint)[0].close()
    assert threading.active_count() <= before


def test_a_worker_that_does_not_report_its_devices() -> None:
    with ScriptedWorker(before=when(wire.DeviceCount, close_it)) as worker, pytest.raises(DeviceLost):
        connect(worker.endpoint)


def test_a_connection_lost_from_its_own_callback_can_be_closed() -> None:
    with ScriptedWorker() as worker:
        connection = WorkerConnection(worker.endpoint)
        connection.on_lost(lambda why: connection.close())
        worker.before = when(wire.DeviceCount, close_it)
        with pytest.raises(DeviceLost):
            connection.start_call(wire.DeviceCount()).result(60)
        connection.close()
