"""RemoteDevice with llama.cpp's ggml-rpc-server."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from peer_worker import connect_soon, peer_worker
from reference import ReferenceModel
from remote_model import RemoteModel, assert_close
from tiny_models import make_gemma3, make_llama
from translator import GRAPH_COMPUTE, GRAPH_RECOMPUTE, Translator
from waiting import GUARD

from llamado.devices.device import DeviceError, DeviceLost
from llamado.ggml import Graph
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T
from llamado.rpc.client.device import RemoteDevice
from llamado.rpc.hashing import fnv1a

pytestmark = pytest.mark.interop


@pytest.fixture
def device(peer_bin: Path) -> Iterator[RemoteDevice]:
    with peer_worker(peer_bin) as (endpoint, _):
        device = connect_soon(endpoint)
        yield device
        device.close()


@pytest.mark.parametrize("make", [make_llama, make_gemma3])
def test_a_model_computes_the_right_logits(device: RemoteDevice, make: Callable[..., Path], tmp_path: Path) -> None:
    """A prompt, tokens after it by GRAPH_RECOMPUTE, and a prompt again; keys and values stay on the worker."""
    path = make(tmp_path / "m.gguf", wtype="F32")
    model, reference = RemoteModel(path, device), ReferenceModel(path)
    prompt = [5, 99, 200, 17, 42, 7, 300, 11]
    right = reference.logits(prompt, outputs=range(8))
    assert_close(model.logits(prompt), right, 2e-3)
    for position, token in enumerate((3, 250, 77), 8):
        right = reference.logits([token], positions=[position])
        assert_close(model.logits([token], position), right, 2e-3)
    right = reference.logits(prompt, outputs=range(8))
    assert_close(model.logits(prompt), right, 2e-3)


def test_a_model_over_protocol_8(peer_bin: Path, tmp_path: Path) -> None:
    """ggml's back end behind a translator to 8.0: two alternating graphs are sent once each."""
    path = make_llama(tmp_path / "m.gguf", wtype="F32")
    with peer_worker(peer_bin) as (endpoint, _), Translator(int(endpoint.rpartition(":")[2]), newer=True) as stand_in:
        device = connect_soon(f"127.0.0.1:{stand_in.port}")
        model, reference = RemoteModel(path, device), ReferenceModel(path)
        prompt = [5, 99, 200, 17]
        right = reference.logits(prompt, outputs=range(4))
        for position, token in enumerate((3, 250, 77), 4):
            assert_close(model.logits(prompt), right, 2e-3)
            assert_close(model.logits([token], position), reference.logits([token], positions=[position]), 2e-3)
        assert stand_in.seen[GRAPH_COMPUTE] == 2 and stand_in.seen[GRAPH_RECOMPUTE] == 4
        assert stand_in.refused == []
        device.close()


@pytest.mark.parametrize("wtype", ["Q4_0", "Q8_0", "Q4_K"])
def test_quantized_weights(device: RemoteDevice, wtype: str, tmp_path: Path) -> None:
    """Rows of 256: tensors that may be padded go through GET_ALLOC_SIZE and INIT_TENSOR. Activations are quantized."""
    path = make_llama(tmp_path / "m.gguf", wtype=wtype, n_embd=256, n_ff=512)
    model, reference = RemoteModel(path, device), ReferenceModel(path)
    prompt = [5, 99, 200, 17]
    found, right = model.logits(prompt), reference.logits(prompt, outputs=range(4))
    assert np.corrcoef(found.ravel(), right.ravel())[0, 1] > 0.99
    np.testing.assert_array_equal(model.logits(prompt), found)


def test_activations_in_a_crowded_buffer(device: RemoteDevice) -> None:
    """A chain whose results live for different times, so that any overlap shows."""
    graph = Graph()
    x = graph.input("x", T.F32, 1000)
    values = [x]
    rng = np.random.default_rng(0)
    picks = [(int(rng.integers(max(0, i - 12), i + 1)), int(rng.integers(max(0, i - 4), i + 1))) for i in range(150)]
    for a, b in picks:
        values.append(g.scale(g.add(values[a], values[b]), 0.5))
    total = values[-1]
    for value in values[-30:-1:3]:
        total = g.add(total, value)
    graph.output("y", total)
    device.place([x, total])
    data = rng.standard_normal(1000).astype(np.float32)
    right = [data]
    for a, b in picks:
        right.append((right[a] + right[b]) * np.float32(0.5))
    y = right[-1]
    for value in right[-30:-1:3]:
        y = y + value
    device.write(x, data)
    for _ in range(2):
        device.submit(graph)
        np.testing.assert_array_equal(device.read(total, 0, total.nbytes).result(60).view(np.float32), y)


@pytest.mark.parametrize(("source", "target", "n"), [(0, 5000, 3000), (0, 1, 9000), (1, 0, 9000), (0, 2000, 8000)])
def test_copies(device: RemoteDevice, source: int, target: int, n: int) -> None:
    whole = g.new_tensor(T.I8, 10_000)
    device.place([whole])
    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    device.write(whole, data)
    device.copy(g.view_1d(whole, n, source), g.view_1d(whole, n, target))
    data[target : target + n] = data[source : source + n].copy()
    np.testing.assert_array_equal(device.read(whole, 0, 10_000).result(60), data)


def test_an_allocation_beyond_the_memory(device: RemoteDevice) -> None:
    free = device.memory()[0]
    tensors = [g.new_tensor(T.I8, 1 << 30, free >> 30) for _ in range(3)]
    with pytest.raises(DeviceError, match=rf"{device.name.split('[')[0]}.* lacks [\d,.]+ MB"):
        device.place(tensors)
    device.place([g.new_tensor(T.I8, 10)])


def test_its_cache_is_used(peer_bin: Path, tmp_path: Path) -> None:
    data = [np.random.default_rng(i).integers(0, 256, (11 << 20) + i, np.uint8) for i in range(2)]
    small = np.ones(1000, np.uint8)
    hashes = [fnv1a(d) for d in data]
    with peer_worker(peer_bin, "-c", cache=tmp_path) as (endpoint, _):
        for turn in range(2):
            device = connect_soon(endpoint)
            pairs = [(g.new_tensor(T.I8, d.nbytes, name=f"w{i}"), d) for i, d in enumerate([*data, small])]
            done: list[int] = []
            device.load(pairs, done.append)
            for tensor, right in pairs:
                np.testing.assert_array_equal(device.read(tensor, 0, tensor.nbytes).result(60), right)
            assert sum(done) == sum(d.nbytes for _, d in pairs)
            # a cached weight is reported in one piece
            assert (max(done) < 11 << 20) == (turn == 0)
            device.close()
        files = {p.name: p.read_bytes() for p in (tmp_path / "rpc").iterdir()}
        assert files == {f"{h:016x}": d.tobytes() for h, d in zip(hashes, data, strict=True)}


@pytest.mark.parametrize("busy", [False, True])
def test_killed(peer_bin: Path, busy: bool) -> None:
    with peer_worker(peer_bin) as (endpoint, process):
        device = connect_soon(endpoint)
        lost = threading.Event()
        device.on_lost(lambda error: lost.set())
        graph = Graph()
        x = graph.input("x", T.F32, 1 << 20)
        y = x
        for _ in range(3000):
            y = g.add(y, x)
        graph.output("y", y)
        device.place([x, y])
        if busy:  # about a second of work
            device.submit(graph)
            future = device.read(y, 0, 4)
            time.sleep(0.1)
            assert not future.done()
        process.send_signal(signal.SIGKILL)
        assert lost.wait(GUARD)
        if busy:
            with pytest.raises(DeviceLost):
                future.result(0)
        with pytest.raises(DeviceLost, match="RPC0"):
            device.submit(graph)
        device.close()
