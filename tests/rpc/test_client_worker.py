"""RemoteDevice with our own worker: the same bits as without a wire, and heartbeats."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from peer_worker import connect_soon
from ports import free_port
from remote_model import RemoteModel
from tiers import first_of
from tiny_models import make_gemma3, make_llama
from waiting import GUARD, until
from wire_client import running

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import DeviceError, DeviceLost
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T
from llamado.rpc import wire
from llamado.rpc.client.device import RemoteDevice, connect
from llamado.rpc.client.heartbeat import Heartbeat, Patience
from llamado.rpc.worker.connection import ClientConnection
from llamado.rpc.worker.server import Worker, WorkerOptions


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteDevice]:
    monkeypatch.setattr("llamado.rpc.worker.server.cache_folder", lambda: tmp_path / "cache")
    cpu = CpuDevice(1)
    worker = Worker([cpu], WorkerOptions(port=0, cache=True, mem=1 << 30))
    thread = threading.Thread(target=worker.serve)
    thread.start()
    device = connect(worker.endpoint)[0]
    yield device
    device.close()
    worker.stop()
    thread.join()
    cpu.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    first_of([(make_llama, "Q4_0"), (make_gemma3, "F16"), (make_llama, "F16"), (make_gemma3, "Q4_0")], 2),
)
def test_the_same_bits(device: RemoteDevice, model: tuple[Callable[..., Path], str], tmp_path: Path) -> None:
    assert device.is_ours
    make, wtype = model
    path = make(tmp_path / "m.gguf", wtype=wtype)
    cpu = CpuDevice(1)
    here, there = RemoteModel(path, cpu), RemoteModel(path, device)
    prompt = [5, 99, 200, 17, 42, 7, 300, 11]
    np.testing.assert_array_equal(there.logits(prompt), here.logits(prompt))
    for position, token in enumerate((3, 250, 77), 8):
        np.testing.assert_array_equal(there.logits([token], position), here.logits([token], position))
    np.testing.assert_array_equal(there.logits(prompt), here.logits(prompt))
    cpu.close()


def test_many_graphs_in_flight(device: RemoteDevice, tmp_path: Path) -> None:
    """Several batches are sent before the first response is read."""
    there = RemoteModel(make_llama(tmp_path / "m.gguf"), device)
    right = [there.logits([token], 0) for token in range(10)]
    graph = next(iter(there.graphs.values()))
    out, futures = graph.outputs["logits"], []
    for token in range(10):
        device.write(graph.inputs["tokens"], np.array([token], np.int32))
        device.submit(graph)
        futures.append(device.read(out, 0, out.nbytes))
    for future, logits in zip(futures, right, strict=True):
        np.testing.assert_array_equal(future.result(60).view(np.float32).reshape(1, -1), logits)


@pytest.mark.parametrize(("source", "target", "n"), [(0, 5000, 3000), (0, 1, 9000), (1, 0, 9000)])
def test_copies(device: RemoteDevice, source: int, target: int, n: int) -> None:
    whole = g.new_tensor(T.I8, 10_000)
    device.place([whole])
    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    device.write(whole, data)
    device.copy(g.view_1d(whole, n, source), g.view_1d(whole, n, target))
    data[target : target + n] = data[source : source + n].copy()
    np.testing.assert_array_equal(device.read(whole, 0, 10_000).result(60), data)


def test_the_limit_of_a_worker(device: RemoteDevice) -> None:
    with pytest.raises(DeviceError, match="lacks"):
        device.place([g.new_tensor(T.I8, 1 << 30, 2)])
    assert device.memory()[1] == 1 << 30
    device.place([g.new_tensor(T.I8, 100)])


@pytest.mark.slow
def test_weights_by_hash(device: RemoteDevice, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 11 << 20, np.uint8)
    for turn in range(2):
        tensor = g.new_tensor(T.I8, data.nbytes, name="w")
        done: list[int] = []
        buffers = device.load([(tensor, data)], done.append)
        np.testing.assert_array_equal(device.read(tensor, 0, tensor.nbytes).result(60), data)
        assert sum(done) == data.nbytes
        assert (len(done) == 1) == (turn == 1)
        until(lambda: any((tmp_path / "cache").glob("*/*-11534336")))  # it is kept while the buffer is there
        buffers[0].free()


def test_two_clients(device: RemoteDevice) -> None:
    other = connect(device.endpoint)[0]
    tensors = [g.new_tensor(T.I8, 1000) for _ in range(2)]
    for i, (one, tensor) in enumerate(zip((device, other), tensors, strict=True)):
        one.place([tensor])
        one.write(tensor, np.full(1000, i, np.uint8))
    assert not device.read(tensors[0], 0, 1000).result(60).any()
    assert other.read(tensors[1], 0, 1000).result(60).all()
    other.close()
    assert device.lost is None


def test_heartbeats_reconnect_after_an_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeat connections own no buffers, so a crowded worker closes them. The client with buffers is not lost."""
    beats = Patience.of(60)._replace(interval=0.02)
    monkeypatch.setattr(Patience, "of", lambda seconds: beats)
    cpu = CpuDevice(1)
    with running(cpu) as worker:
        device = connect(worker.endpoint)[0]
        tensor = g.new_tensor(T.I8, 1000)
        device.place([tensor])
        device.write(tensor, np.full(1000, 7, np.uint8))
        assert device.read(tensor, 0, 1000).result(60).tolist() == [7] * 1000
        greet, turned_away = ClientConnection.greet, []

        def turn_away_the_first(connection: ClientConnection, tls: object) -> wire.Request:
            if not turned_away:
                turned_away.append(connection)
                raise ConnectionResetError("let go for another")
            return greet(connection, None)

        beat, answered = Heartbeat.beat, list[str | None]()

        def counted(heartbeat: Heartbeat) -> str | None:
            answered.append(why := beat(heartbeat))
            return why

        monkeypatch.setattr(ClientConnection, "greet", turn_away_the_first)
        monkeypatch.setattr(Heartbeat, "beat", counted)
        for _ in range(3):
            sessions = {*worker._sessions}
            (beating,) = (session for session in sessions if session.idle_since is not None)
            turned_away.clear()
            answered.clear()
            beating.shut()
            # The second, at the latest, came by another connection.
            until(lambda: len(answered) >= 2 or device.lost is not None)
            assert not any(answered), answered
            until(lambda gone=beating: gone not in worker._sessions)  # type: ignore[misc]
            until(lambda: len(worker._sessions) == 2)  # the rejected connection ends, too
            assert turned_away
        assert device.read(tensor, 0, 1000).result(60).tolist() == [7] * 1000
        device.close()
        until(lambda: not worker._sessions)
    cpu.close()


@pytest.mark.slow
def test_a_worker_that_freezes_or_dies() -> None:
    """A connection with a short time limit detects that it froze; a patient one detects that it died."""
    port = free_port()
    command = [
        sys.executable,
        "-c",
        "from llamado.commands.cli import main; main()",
        "worker",
        "-p",
        str(port),
        "-t",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    try:
        hasty = connect_soon(f"127.0.0.1:{port}", alive_timeout=1.0)
        patient = connect_soon(f"127.0.0.1:{port}", alive_timeout=GUARD)
        assert hasty.is_ours
        tensors = [g.new_tensor(T.I8, 1000) for _ in range(2)]
        lost = [threading.Event() for _ in range(2)]
        for device, tensor, event in zip((hasty, patient), tensors, lost, strict=True):
            device.place([tensor])
            device.on_lost(lambda error, event=event: event.set())
        process.send_signal(signal.SIGSTOP)
        assert lost[0].wait(60) and not lost[1].is_set()
        with pytest.raises(DeviceLost, match="sign of life"):
            hasty.read(tensors[0], 0, 1).result(0)
        process.send_signal(signal.SIGKILL)
        assert lost[1].wait(60)
        with pytest.raises(DeviceLost, match="connection"):
            patient.read(tensors[1], 0, 1).result(0)
        hasty.close()
        patient.close()
    finally:
        process.kill()
        process.wait()
