"""Recovery of a split model whose devices fail: what is loaded again, from where, and unchanged bits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rows import start_at
from tiers import first_of
from tiny_models import make_gemma3, make_llama
from waiting import until

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.device import Bytes, DeviceError, DeviceLost
from llamado.devices.split.placement import NotEnoughMemory, Placement, SplitOptions
from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.drafts.suffix import Suffix
from llamado.engine.engine import Engine
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.options import EngineOptions
from llamado.engine.request import GenerationParams, Request
from llamado.engine.sampling.params import Sampling
from llamado.engine.scheduler import outage
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models import load_model

from .fake import FakeTokenizer, ask, send

Array = np.ndarray[Any, Any]


class MortalDevice:
    """A local device that behaves like a remote one: reads are copies.

    After `die`, everything fails with DeviceLost. `before` is called with the name of each method; it may raise, wait
    or kill the device.
    """

    local, endpoint, links, numerics = False, SimpleNamespace(host="far"), False, "made up"
    utilization = None

    def supports(self, op: Op, type: TensorType) -> bool:
        return self._device.supports(op, type)

    def __init__(self, name: str, jit: Jit) -> None:
        self.name = name
        self.lost: DeviceLost | None = None
        self.loaded: list[str] = []
        self.placed: list[str] = []
        self.before: Callable[[str], None] = lambda what: None
        self.closed = False
        self._device = CpuDevice(1, jit=jit)
        self._callbacks: list[Callable[[DeviceLost], None]] = []
        self._inside = threading.Lock()

    @contextmanager
    def _alone(self, what: str) -> Iterator[CpuDevice]:
        assert self._inside.acquire(blocking=False), "two callers at a time"
        try:
            self.before(what)
            if self.lost is not None:
                raise DeviceLost(self.name, self.lost.why)
            yield self._device
            if self.lost is not None:
                raise DeviceLost(self.name, self.lost.why)
        finally:
            self._inside.release()

    def on_lost(self, callback: Callable[[DeviceLost], None]) -> None:
        self._callbacks.append(callback)

    def die(self, *, quietly: bool = False) -> None:
        self.lost = DeviceLost(self.name, "it reset the connection")
        if not quietly:
            self.tell()

    def tell(self) -> None:
        assert self.lost is not None
        for callback in self._callbacks:
            callback(self.lost)

    def place(self, tensors: Sequence[Tensor]) -> list[Any]:
        with self._alone("place") as device:
            found = device.place(tensors)
            self.placed += [tensor.name for tensor in tensors]
            return found

    local_weight_bytes = 0

    def announce_weights(self, weights: Sequence[tuple[Tensor, Bytes]]) -> None:
        pass

    def load(self, weights: Sequence[tuple[Tensor, Bytes]], progress: Callable[[int], None] | None = None) -> list[Any]:
        with self._alone("load") as device:
            found = device.load([(tensor, data.copy()) for tensor, data in weights], progress)
            self.loaded += [tensor.name for tensor, _ in weights]
            return found

    def write(self, tensor: Tensor, data: Array, offset: int = 0) -> None:
        with self._alone("write") as device:
            device.write(tensor, data, offset)

    def prepare(self, graph: Graph) -> object:
        with self._alone("prepare") as device:
            return device.prepare(graph)

    def submit(self, graph: Graph) -> None:
        with self._alone("submit") as device:
            device.submit(graph)

    def read(self, tensor: Tensor, offset: int, size: int) -> Future[Bytes]:
        future: Future[Bytes] = Future()
        with self._alone("read") as device:
            data = device.read(tensor, offset, size).result().copy()
        future.set_result(data)
        return future

    def copy(self, source: Tensor, target: Tensor) -> None:
        with self._alone("copy") as device:
            device.copy(source, target)

    def memory(self) -> tuple[int, int]:
        return self._device.memory()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._device.close()


class Cluster:
    """The devices of a split model, with reconnecting and a new placement on the remaining ones."""

    def __init__(self, path: Path, placement: Placement, jit: Jit, n_devices: int = 3, **options: Any) -> None:
        self.jit = jit
        self.file = GGUFFile.open(path)
        self.opened = [MortalDevice(f"RPC{i}", jit) for i in range(1, n_devices)]
        self.away: set[str] = set()
        self.room = True
        self.asked: list[str] = []
        self.replaced: list[list[int]] = []
        self.forward = ModelRunner(
            self.file,
            load_model(self.file),
            [CpuDevice(1, jit=jit), *self.opened],
            RunnerOptions(reconnect=self.reconnect, replace=self.replace, **{"n_cells": 2048, **options}),
            placement,
        )

    def reconnect(self, lost: MortalDevice) -> MortalDevice:
        assert lost.lost is not None and lost.closed
        self.asked.append(lost.name)
        if lost.name in self.away:
            raise DeviceLost(lost.name, "connection refused")
        self.opened.append(MortalDevice(lost.name, self.jit))
        return self.opened[-1]

    def replace(self, placement: Placement, alive: Sequence[int]) -> Placement:
        self.replaced.append([*alive])
        if not self.room:
            raise NotEnoughMemory("not enough memory: CPU lacks 12 MiB", {"CPU": 12 << 20})
        target = alive[-1]
        layers = tuple(i if i in alive else target for i in placement.layers)
        head = placement.head if placement.head in alive else target
        overrides = tuple((pattern, i) for pattern, i in placement.overrides if i in alive)
        return Placement(layers, head, 0, overrides)

    def device(self, number: int) -> MortalDevice:
        device = self.forward.devices[number]
        assert isinstance(device, MortalDevice)
        return device


Open = Callable[..., Cluster]


@pytest.fixture
def open_cluster(jit: Jit) -> Iterator[Open]:
    opened: list[Cluster] = []

    def open_(path: Path, placement: Placement, **options: Any) -> Cluster:
        opened.append(Cluster(path, placement, jit, **options))
        return opened[-1]

    yield open_
    for one in opened:
        one.forward.close()
        one.file.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return make_llama(path, n_embd=256, n_ff=512, n_layer=4, n_vocab=300, wtype="Q4_K")


def text(n: int, seed: int = 0, n_vocab: int = 300) -> list[int]:
    return np.random.default_rng(seed).integers(0, n_vocab, n).tolist()


def feed(forward: ModelRunner, tokens: list[int], start: int = 0, chunk: int = 16) -> Array:
    """Return the logits of every token of a sequence."""
    found = []
    for at in range(0, len(tokens), chunk):
        part = np.array(tokens[at : at + chunk], np.int32)
        n = len(part)
        future = start_at(forward, part, np.arange(at, at + n), np.full(n, start), np.arange(n))
        found.append(future.result(60).copy())
    return np.concatenate(found)


def same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture(scope="module")
def right(model: Path, jit: Jit) -> Array:
    with (
        GGUFFile.open(model) as file,
        closing(ModelRunner(file, load_model(file), [CpuDevice(1, jit=jit)], RunnerOptions(n_cells=2048))) as forward,
    ):
        return feed(forward, text(40))


TWO = Placement((1, 1, 2, 2), 2)


@pytest.mark.slow
def test_only_lost_weights_are_loaded_again(model: Path, open_cluster: Open, right: Array) -> None:
    cluster = open_cluster(model, TWO)
    forward = cluster.forward
    assert same(feed(forward, text(40)), right)
    first, second = cluster.device(1), cluster.device(2)
    assert first.loaded and second.loaded and not set(first.loaded) & set(second.loaded)
    before = [*second.loaded], [*second.placed]
    reported = threading.Event()
    forward.recovery.watch(reported.set)
    first.die()
    assert reported.is_set() and forward.recovery.lost() is not None
    with pytest.raises(DeviceLost):
        feed(forward, text(3))
    forward.recovery.restore(False)
    assert forward.recovery.lost() is None
    assert sorted(cluster.device(1).loaded) == sorted(first.loaded) and cluster.device(1) is not first
    assert (second.loaded, second.placed) == before
    assert same(feed(forward, text(40)), right) and same(feed(forward, text(40), start=512, chunk=1), right)


def test_unreachable_device_keeps_its_layers(model: Path, open_cluster: Open, right: Array) -> None:
    cluster = open_cluster(model, TWO)
    forward = cluster.forward
    cluster.away = {"RPC1"}
    cluster.device(1).die()
    for _ in range(3):
        with pytest.raises(DeviceLost, match="RPC1 is lost: connection refused"):
            forward.recovery.restore(False)
        assert forward.recovery.lost() is not None
    cluster.away.clear()
    forward.recovery.restore(False)
    assert same(feed(forward, text(40)), right)
    assert cluster.replaced == []


@pytest.mark.slow
@pytest.mark.parametrize("placement", [TWO, Placement((1, 1, 1, 1), 1), Placement((0, 1, 1, 2), 2)], ids=str)
def test_layers_move_to_the_remaining_devices(
    model: Path, open_cluster: Open, right: Array, placement: Placement
) -> None:
    cluster = open_cluster(model, placement)
    forward = cluster.forward
    feed(forward, text(40))
    cluster.away = {"RPC1", "RPC2"}
    cluster.device(1).die()
    forward.recovery.restore(True)
    assert cluster.replaced == [[0, 2]]
    assert same(feed(forward, text(40)), right)
    cluster.device(2).die()
    forward.recovery.restore(True)  # all on this machine
    assert cluster.replaced == [[0, 2], [0]]
    assert same(feed(forward, text(40)), right) and same(feed(forward, text(40), start=512, chunk=1), right)


def test_one_of_two_lost_devices_comes_back(model: Path, open_cluster: Open, right: Array) -> None:
    cluster = open_cluster(model, Placement((1, 2, 3, 3), 3), n_devices=4)
    forward = cluster.forward
    cluster.away = {"RPC1", "RPC3"}
    for number in (1, 2, 3):
        cluster.device(number).die()
    with pytest.raises(DeviceLost, match="device RPC1 and RPC3 is lost"):
        forward.recovery.restore(False)
    cluster.away = {"RPC3"}
    forward.recovery.restore(True)
    assert cluster.replaced == [[0, 1, 2]], "the reconnected device keeps its layers"
    assert forward.placement == Placement((1, 2, 2, 2), 2)
    assert same(feed(forward, text(40)), right)


@pytest.mark.parametrize("what", ["place", "load"])
@pytest.mark.parametrize("dies", [1, 2])
def test_second_loss_during_a_restore(model: Path, open_cluster: Open, right: Array, what: str, dies: int) -> None:
    """Another device fails while it receives the layers of the third, or while it is reconnected."""
    cluster = open_cluster(model, Placement((1, 2, 2, 3), 3), n_devices=4)
    forward = cluster.forward
    feed(forward, text(40))

    def die(now: str, device: MortalDevice) -> None:
        if now == what:
            device.die()

    if dies == 2:
        cluster.away = {"RPC3"}
        second = cluster.device(2)
        second.before = lambda now: die(now, second)
        cluster.replace = lambda p, alive: Placement((1, 2, 2, 2), 2)  # type: ignore[method-assign]
        forward.recovery.replace = cluster.replace
    else:
        reconnect = cluster.reconnect

        def doomed(lost: MortalDevice) -> MortalDevice:
            device = reconnect(lost)
            if len(cluster.opened) == 4:
                device.before = lambda now: die(now, device)
            return device

        forward.recovery.reconnect = doomed  # type: ignore[assignment]
        cluster.device(1).die()
    cluster.device(3).die()
    with pytest.raises(DeviceLost):
        forward.recovery.restore(True)
    assert forward.recovery.lost() is not None
    loaded = {device.name: [*device.loaded] for device in cluster.opened if device.lost is None}
    cluster.away.clear()
    forward.recovery.restore(False)
    assert same(feed(forward, text(40)), right)
    for device in cluster.opened:
        if device.name in loaded and device in forward.devices:
            assert len(set(device.loaded)) == len(device.loaded), "loaded twice"
            assert len(set(device.placed)) == len(device.placed), "placed twice"


def test_no_memory_on_other_devices(model: Path, open_cluster: Open, right: Array) -> None:
    cluster = open_cluster(model, TWO)
    forward = cluster.forward
    cluster.room, cluster.away = False, {"RPC2"}
    cluster.device(2).die()
    for _ in range(2):
        with pytest.raises(NotEnoughMemory):
            forward.recovery.restore(True)
        assert forward.recovery.lost() is not None and forward.placement == TWO
    cluster.away.clear()
    forward.recovery.restore(True)
    assert forward.placement == TWO
    assert same(feed(forward, text(40)), right)


@pytest.mark.parametrize("what", ["place", "load"])
def test_refused_weights_leave_the_placement_unchanged(
    model: Path, open_cluster: Open, right: Array, what: str
) -> None:
    """The placement counts on another device, which refuses; recovery still waits for the lost one."""
    cluster = open_cluster(model, TWO)
    forward = cluster.forward
    cluster.away = {"RPC2"}

    def full(now: str) -> None:
        if now == what:
            raise DeviceError("RPC1 lacks 12.0 MB")

    cluster.device(1).before = full
    forward.recovery.replace = lambda p, alive: Placement((1, 1, 1, 1), 1)
    cluster.device(2).die()
    with pytest.raises(DeviceError, match=r"lacks 12\.0 MB"):
        forward.recovery.restore(True)
    assert forward.recovery.lost() is not None and forward.placement == TWO
    cluster.away.clear()
    forward.recovery.restore(False)
    assert same(feed(forward, text(40)), right)
    assert len(set(cluster.device(1).loaded)) == len(cluster.device(1).loaded)


@pytest.mark.slow
@pytest.mark.parametrize("make", first_of([make_llama, make_gemma3]))
def test_larger_activations_cross_after_a_loss(
    tmp_path: Path, open_cluster: Open, jit: Jit, make: Callable[..., Path]
) -> None:
    """Tensors between devices change their sizes; the buffers for them grow as needed."""
    path = make(tmp_path / "m.gguf", n_embd=256, n_ff=1024, n_layer=4, wtype="Q4_K")
    plain = GGUFFile.open(path)
    alone = ModelRunner(plain, load_model(plain), [CpuDevice(1, jit=jit)], RunnerOptions(n_cells=512))
    expected = feed(alone, text(70), chunk=70)
    alone.close()
    cluster = open_cluster(path, Placement((0, 1, 1, 1), 1, 0, (("blk.2.ffn_up", 2),)), n_cells=512, max_batch=70)
    forward = cluster.forward
    assert same(feed(forward, text(70), chunk=70), expected)
    forward.recovery.replace = lambda p, alive: Placement(
        (0, 2, 2, 2), 2, 0, (("blk.0.ffn_down", 2), ("blk.1.ffn_up", 0))
    )
    cluster.away = {"RPC1"}
    cluster.device(1).die()
    forward.recovery.restore(True)
    assert same(feed(forward, text(70), chunk=70), expected)
    plain.close()


def test_device_with_single_weights_is_restored(model: Path, open_cluster: Open, right: Array) -> None:
    cluster = open_cluster(model, Placement((1, 1, 1, 1), 1, 0, (("blk.2.ffn_up", 2),)))
    forward = cluster.forward
    assert same(feed(forward, text(40)), right)
    cluster.device(2).die()
    assert forward.recovery.lost() is not None
    cluster.away = {"RPC2"}
    with pytest.raises(DeviceLost):
        forward.recovery.restore(False)
    forward.recovery.restore(True)
    assert same(feed(forward, text(40)), right)


def test_losing_an_unused_device_is_ignored(model: Path, open_cluster: Open, right: Array) -> None:
    cluster = open_cluster(model, Placement((1, 1, 1, 1), 1))
    forward = cluster.forward
    cluster.away = {"RPC2"}
    cluster.device(2).die()
    assert forward.recovery.lost() is None
    assert same(feed(forward, text(40)), right)
    cluster.device(1).die()
    forward.recovery.restore(False)
    assert cluster.asked == ["RPC1"]
    assert same(feed(forward, text(40)), right)


def test_loss_is_detected_while_another_device_computes(model: Path, open_cluster: Open) -> None:
    cluster = open_cluster(model, TWO)
    forward = cluster.forward
    gate, inside = threading.Event(), threading.Event()

    def wait(what: str) -> None:
        if what == "submit":
            inside.set()
            gate.wait(60)

    cluster.device(1).before = wait
    four = np.arange(4, dtype=np.int32)
    future = start_at(forward, four, four, np.zeros(4), four)
    assert inside.wait(60)
    cluster.device(2).die()
    with pytest.raises(DeviceLost, match="RPC2"):
        future.result(60)
    gate.set()


@pytest.mark.slow
def test_restore_waits_for_a_computing_thread(model: Path, open_cluster: Open, right: Array) -> None:
    """A thread may still compute an abandoned batch; restore waits for it. `_alone` fails if there are two callers."""
    cluster = open_cluster(model, Placement((1, 1, 2, 2), 2))
    forward = cluster.forward
    inside = threading.Event()

    def slow(what: str) -> None:
        if what == "submit":
            inside.set()
            time.sleep(0.3)

    cluster.device(1).before = slow
    four = np.arange(4, dtype=np.int32)
    future = start_at(forward, four, four, np.zeros(4), four)
    inside.wait(60)
    future.cancel()
    cluster.away = {"RPC2"}
    forward.recovery.replace = lambda p, alive: Placement((1, 1, 1, 1), 1)
    cluster.device(2).die()
    forward.recovery.restore(True)
    cluster.device(1).before = lambda what: None
    assert same(feed(forward, text(40)), right)


def test_late_loss_of_a_replaced_device_is_ignored(model: Path, open_cluster: Open, right: Array) -> None:
    cluster = open_cluster(model, TWO)
    forward = cluster.forward
    old = cluster.device(1)
    old.die(quietly=True)
    with pytest.raises(DeviceLost):
        feed(forward, text(3))
    forward.recovery.restore(False)
    old.tell()
    assert forward.recovery.lost() is None
    assert same(feed(forward, text(40)), right)


def test_loss_at_the_end_of_a_restore(model: Path, open_cluster: Open, right: Array) -> None:
    cluster = open_cluster(model, TWO)
    forward = cluster.forward
    reconnect = cluster.reconnect

    def doomed(lost: MortalDevice) -> MortalDevice:
        forward.recovery.reconnect = cluster.reconnect  # type: ignore[assignment]
        cluster.device(1).die()  # while the second is reconnected
        return reconnect(lost)

    forward.recovery.reconnect = doomed  # type: ignore[assignment]
    cluster.device(2).die()
    with pytest.raises(DeviceLost, match="RPC1"):
        forward.recovery.restore(False)
    assert forward.recovery.lost() is not None and "RPC1" in str(forward.recovery.lost())
    forward.recovery.restore(False)
    assert same(feed(forward, text(40)), right)


def test_loss_while_loading_at_start(model: Path, jit: Jit) -> None:
    """The error names the worker, and the other devices are closed."""

    made: list[MortalDevice] = []
    original = MortalDevice.load

    def load(self: MortalDevice, *args: Any) -> Any:
        made.append(self)
        if self.name == "RPC2":
            self.die()
        return original(self, *args)

    MortalDevice.load = load  # type: ignore[method-assign]
    try:
        with pytest.raises(DeviceLost, match="RPC2"):
            Cluster(model, TWO, jit)
    finally:
        MortalDevice.load = original  # type: ignore[method-assign]
    assert {device.name for device in made} == {"RPC1", "RPC2"} and all(device.closed for device in made)


def test_close_during_a_restore(model: Path, open_cluster: Open) -> None:
    cluster = open_cluster(model, TWO)
    forward = cluster.forward
    gate, inside = threading.Event(), threading.Event()
    reconnect = cluster.reconnect

    def slow(lost: MortalDevice) -> MortalDevice:
        inside.set()
        gate.wait(60)
        return reconnect(lost)

    forward.recovery.reconnect = slow  # type: ignore[assignment]
    cluster.device(1).die()
    failed: list[Exception] = []

    def restore() -> None:
        try:
            forward.recovery.restore(False)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=restore)
    thread.start()
    assert inside.wait(60)
    forward.close()
    gate.set()
    thread.join(60)
    assert not thread.is_alive() and failed
    assert all(device.closed for device in cluster.opened)


class WordTokenizer(FakeTokenizer):
    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"%d " % token


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_of(range(3)))
def test_losing_devices_does_not_change_answers(
    model: Path, open_cluster: Open, jit: Jit, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "_FIRST_PAUSE", 0.002)
    monkeypatch.setattr(outage, "_LONGEST_PAUSE", 0.02)
    rng = random.Random(seed)
    tokenizer = WordTokenizer()
    requests = []
    for i in range(8):
        shared = text(rng.choice([0, 30, 90]), rng.randrange(2))
        sampling = Sampling(seed=i, temperature=rng.choice([0.0, 0.8]), ignore_eos=True)
        requests.append(
            Request(
                prompt=shared + text(rng.randrange(1, 40), 5 + i),
                params=GenerationParams(n_predict=60, sampling=sampling),
            )
        )
    with GGUFFile.open(model) as file:
        alone = ModelRunner(file, load_model(file), [CpuDevice(1, jit=jit)], RunnerOptions(n_cells=2048))
        judge = Engine(alone, tokenizer)
        expected = [ask(judge, request).tokens for request in requests]
        judge.close()
        alone.close()
    cluster = open_cluster(model, Placement((1, 2, 2, 3), 3), n_devices=4, n_cells=1024)
    with closing(
        Engine(
            cluster.forward,
            tokenizer,
            EngineOptions(n_slots=4, n_ctx=600, split=SplitOptions(failover=0.05)),
            drafts=DraftManager([Suffix()]),
        )
    ) as engine:
        clients = [send(engine, request) for request in requests]
        killed = 0
        while not all(client.over.is_set() for client in clients) and killed < 12:
            time.sleep(rng.choice([0.01, 0.05, 0.1, 0.2]))
            cluster.away = {f"RPC{i}" for i in range(1, 4) if rng.random() < 0.2}
            for number in rng.sample((1, 2, 3), rng.choice([1, 1, 1, 2])):
                cluster.device(number).die()
                killed += 1
        cluster.away.clear()
        assert killed > 3
        for client, tokens in zip(clients, expected, strict=True):
            assert client.result.tokens == tokens


# -- devices that come back after their layers moved -----------------------------------------------------------------


def move_layers_away(cluster: Cluster) -> ModelRunner:
    """Lose the first device and move its layers to the second."""
    cluster.away = {"RPC1"}
    cluster.device(1).die()
    cluster.forward.recovery.restore(True)
    return cluster.forward


def test_reconnected_device_gets_its_layers_back(model: Path, open_cluster: Open, right: Array) -> None:
    cluster = open_cluster(model, TWO)
    first = cluster.device(1)
    forward = move_layers_away(cluster)
    (away,) = forward.recovery.away()
    assert (away.device, away.why, away.layers) == ("RPC1", "connection refused", "layers 0 to 1")
    assert away.now == {"RPC2": "layers 0 to 3 and the head"} and abs(away.since - time.time()) < 60
    with pytest.raises(DeviceLost, match="RPC1"):
        forward.recovery.call_back()
    cluster.away.clear()
    forward.recovery.call_back()
    back = cluster.opened[-1]
    assert sorted(back.loaded) == sorted(first.loaded), "weights are loaded before the layers move"
    assert forward.placement == Placement((2, 2, 2, 2), 2) and same(feed(forward, text(40)), right)
    second = [*cluster.device(2).loaded]
    forward.recovery.move_back()
    assert forward.placement == TWO and forward.recovery.away() == () and cluster.device(1) is back
    assert sorted(back.loaded) == sorted(first.loaded) and cluster.device(2).loaded == second, "no weight is sent twice"
    assert same(feed(forward, text(40)), right) and same(feed(forward, text(40), start=512, chunk=1), right)
    cluster.away = {"RPC1"}
    back.die()
    forward.recovery.restore(True)
    assert same(feed(forward, text(40)), right) and cluster.device(2).loaded == second


@pytest.mark.parametrize("what", [None, "place"])
def test_reconnected_device_is_lost_before_its_layers_move(
    model: Path, open_cluster: Open, right: Array, what: str | None
) -> None:
    cluster = open_cluster(model, TWO)
    forward = move_layers_away(cluster)
    cluster.away.clear()
    forward.recovery.call_back()
    back = cluster.opened[-1]
    if what is None:
        back.die()
        forward.recovery.move_back()
    else:
        back.before = lambda now: back.die() if now == what else None
        with pytest.raises(DeviceLost, match="RPC1"):
            forward.recovery.move_back()
    assert forward.recovery.lost() is None and [one.device for one in forward.recovery.away()] == ["RPC1"]
    assert same(feed(forward, text(40)), right)
    forward.rows.copy_rows(forward.memory.tensors, 0, 256, 40)
    forward.recovery.call_back()
    forward.recovery.move_back()
    assert forward.placement == TWO and same(feed(forward, text(40)), right)


def test_loss_while_another_device_waits_for_its_layers(model: Path, open_cluster: Open, right: Array) -> None:
    cluster = open_cluster(model, TWO)
    forward = move_layers_away(cluster)
    cluster.away = {"RPC2"}
    forward.recovery.call_back()
    cluster.device(2).die()
    forward.recovery.restore(True)
    assert {one.device for one in forward.recovery.away()} == {"RPC1", "RPC2"}
    assert same(feed(forward, text(40)), right)
    forward.recovery.move_back()
    assert [one.device for one in forward.recovery.away()] == ["RPC2"] and same(feed(forward, text(40)), right)
    cluster.away.clear()
    forward.recovery.call_back()
    forward.recovery.move_back()
    assert forward.placement == TWO and forward.recovery.away() == () and same(feed(forward, text(40)), right)


@pytest.mark.slow
def test_answers_continue_while_layers_move(
    model: Path, open_cluster: Open, jit: Jit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outage, "_FIRST_PAUSE", 0.002)
    monkeypatch.setattr(outage, "_LONGEST_PAUSE", 0.01)
    caplog.set_level("INFO", "llamado")
    tokenizer = WordTokenizer()
    request = Request(
        prompt=text(30), params=GenerationParams(n_predict=400, sampling=Sampling(seed=3, ignore_eos=True))
    )
    with GGUFFile.open(model) as file:
        alone = ModelRunner(file, load_model(file), [CpuDevice(1, jit=jit)], RunnerOptions(n_cells=1024))
        judge = Engine(alone, tokenizer)
        expected = ask(judge, request).tokens
        judge.close()
        alone.close()
    cluster = open_cluster(model, TWO, n_cells=1024)
    with closing(
        Engine(cluster.forward, tokenizer, EngineOptions(n_slots=2, split=SplitOptions(failover=0.01)))
    ) as engine:
        client = send(engine, request)
        until(lambda: client.tokens)
        cluster.away = {"RPC1"}
        cluster.device(1).die()
        until(lambda: engine.snapshot().degraded and engine.snapshot().fault is None)
        assert "devices: all back" not in caplog.text and "continuing without RPC1" in caplog.text
        assert "RPC2: layers 0 to 3 and the head" in caplog.text
        n = len(client.tokens)
        until(lambda: len(client.tokens) > n)
        cluster.away.clear()
        until(lambda: not engine.snapshot().degraded)
        assert cluster.forward.placement == TWO and not client.over.is_set(), "the answer ended too early"
        assert client.result.tokens == expected
        assert "RPC1: back" in caplog.text and "devices: all back" in caplog.text
        # and while no request runs
        cluster.away = {"RPC2"}
        cluster.device(2).die()
        until(lambda: engine.snapshot().degraded)
        cluster.away.clear()
        until(lambda: not engine.snapshot().degraded)
        few = replace(request, params=replace(request.params, n_predict=40))
        assert ask(engine, few).tokens == expected[:40] and cluster.forward.placement == TWO
