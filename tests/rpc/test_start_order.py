"""Workers that start after the server, or die while it loads."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ports import free_port
from scripted_worker import ScriptedWorker
from tiers import first_of
from tiny_models import make_llama
from waiting import until
from wire_client import running

from llamado.devices.accelerators import Accelerators, LocalDevices
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import WorkerLost
from llamado.devices.registry import DeviceOptions, Unreachable, backend
from llamado.devices.split.placement import SplitOptions
from llamado.engine.forward import device_pool
from llamado.engine.forward.device_pool import DevicePool
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T
from llamado.rpc.client.connection import REPLY_TIMEOUT
from llamado.rpc.client.device import connect
from llamado.rpc.client.heartbeat import Patience
from llamado.rpc.client.workers import WorkersUnreachable


@contextmanager
def worker_at(port: int = 0) -> Iterator[str]:
    cpu = CpuDevice(1)
    with running(cpu, port=port, mem=1 << 30) as worker:
        yield str(worker.endpoint)
    cpu.close()


class MissingCalls:
    """Records the calls about missing workers."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []
        self.whys: list[str] = []
        self.reported = threading.Event()

    def __call__(self, missing: Sequence[Unreachable]) -> None:
        self.names.append([worker.where for worker in missing])
        self.whys += [worker.why for worker in missing]
        if missing:
            self.reported.set()


@pytest.mark.slow
def test_a_late_worker_is_awaited() -> None:
    calls, later = MissingCalls(), free_port()
    with worker_at() as there, ThreadPoolExecutor(1) as pool:
        workers = backend("rpc", (there, f"127.0.0.1:{later}"))
        found = pool.submit(workers.devices, 60.0, calls)
        assert calls.reported.wait(60)
        assert calls.names[0] == [f"127.0.0.1:{later}"] and not found.done()
        assert f"127.0.0.1:{later} is missing since " in calls.whys[0] and "is a worker running?" in calls.whys[0]
        with worker_at(later):
            devices = found.result(60)
            assert [device.name for device in devices] == [f"RPC0[{there}]", f"RPC1[127.0.0.1:{later}]"]
            assert calls.names[-1] == []
            for device in devices:
                device.close()


def test_a_worker_that_dies_during_the_wait_is_awaited() -> None:
    calls, first, second = MissingCalls(), free_port(), free_port()
    workers = backend("rpc", (f"127.0.0.1:{first}", f"127.0.0.1:{second}"))
    with ThreadPoolExecutor(1) as pool:
        with worker_at(first):
            found = pool.submit(workers.devices, 60.0, calls)
            while [f"127.0.0.1:{second}"] not in calls.names:
                assert not found.done()
                time.sleep(0.01)
        with worker_at(second):
            while [f"127.0.0.1:{first}"] not in calls.names:
                assert not found.done()
                time.sleep(0.01)
            with worker_at(first):
                devices = found.result(60)
                assert all(device.lost is None for device in devices)
                for device in devices:
                    device.close()


def test_the_wait_ends() -> None:
    missing = f"127.0.0.1:{free_port()}"
    with pytest.raises(WorkersUnreachable, match=rf"cannot connect to {missing}.*waited for 0.4 s \(--rpc-wait\)"):
        backend("rpc", (missing,)).devices(0.4)


def test_a_silent_worker_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(WorkersUnreachable, match=f"127.0.0.1:{port} does not answer; is it frozen"):
            backend("rpc", (f"127.0.0.1:{port}",)).devices(0.4)


def test_permanent_errors_are_not_awaited() -> None:
    with ScriptedWorker(version=(9, 0, 0)) as worker, pytest.raises(WorkersUnreachable, match=r"speaks RPC 9\.0\.0"):
        backend("rpc", (str(worker.endpoint),)).devices(100.0)


# --- while the model is loaded ------------------------------------------------------------------------------------


def load(path: Path, endpoint: str, progress: Callable[[str, int, int], None] | None = None) -> list[int]:
    split = SplitOptions(rpc=(endpoint,), tensor_split=(1.0,), wait=60.0, alive_timeout=1.0)
    options = EngineOptions(n_ctx=128, n_slots=1, n_threads=1, split=split)
    with LoadedModel.load(path, options, progress=progress) as llama:
        return [*llama.complete([1, 2, 3], n_predict=12, temperature=0.0, ignore_eos=True).tokens]


class SilentWorkers:
    """A back end whose only worker greets and does not respond further."""

    def __init__(self) -> None:
        self.expected: list[float | None] = []

    def devices(self, wait: float, waiting: object) -> list[Any]:
        return [SimpleNamespace(close=lambda: None)]

    def expect_answers(self, seconds: float | None) -> None:
        self.expected.append(seconds)


@pytest.mark.parametrize(("wait", "expected"), [(60.0, 60.0), (1e-9, 5.0), (0.0, None)])
def test_responses_are_awaited_as_long_as_workers(
    wait: float, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, at = SilentWorkers(), iter((0.0, wait, wait))

    def measured(*_: object, **__: object) -> None:
        raise WorkerLost("RPC0", "it has not answered in time")

    monkeypatch.setattr(device_pool, "backend", lambda *_: workers)
    monkeypatch.setattr(device_pool, "_measured", measured)
    monkeypatch.setattr(device_pool.time, "monotonic", lambda: next(at))
    split, file = SplitOptions(rpc=("h:1",), wait=wait), SimpleNamespace(shard_paths=())
    with pytest.raises(WorkerLost, match="not answered in time"):
        DevicePool(split, LocalDevices(None, Accelerators.none()), file, None, None)  # type: ignore[arg-type]
    assert workers.expected == [expected]


def test_the_response_timeout_reaches_the_workers() -> None:
    with ScriptedWorker() as worker:
        workers = backend("rpc", (str(worker.endpoint),))
        (device,) = workers.devices()
        for seconds in (7.0, None):
            workers.expect_answers(seconds)
            assert device._connection.reply_timeout == (seconds or REPLY_TIMEOUT)  # type: ignore[attr-defined]
        device.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("m") / "m.gguf", n_embd=256, n_ff=512, n_layer=3, wtype="Q4_0")


@pytest.fixture(scope="module")
def right(model: Path) -> list[int]:
    with LoadedModel.load(model, EngineOptions(n_ctx=128, n_slots=1, n_threads=1)) as llama:
        return [*llama.complete([1, 2, 3], n_predict=12, temperature=0.0, ignore_eos=True).tokens]


@pytest.mark.slow
@pytest.mark.parametrize("stage", first_of(["compiling kernels", "sending weights"]))
def test_a_worker_that_dies_during_the_load(model: Path, right: list[int], stage: str) -> None:
    first, second = worker_at(), None
    endpoint = first.__enter__()
    port = int(endpoint.rpartition(":")[2])
    stages: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        nonlocal second
        stages.append(what)
        if what.startswith(stage) and second is None:
            second = worker_at(port)
            first.__exit__(None, None, None)
        elif what.startswith("waiting since") and second is not None and not started:
            started.append(second.__enter__())

    started: list[str] = []
    try:
        assert load(model, endpoint, progress) == right
        assert any(f"RPC0[{endpoint}] is lost" in what for what in stages if what.startswith("waiting since"))
    finally:
        if started and second is not None:
            second.__exit__(None, None, None)


def _stopped(pid: int) -> bool:
    """Return True if no thread of a process runs; on a busy machine that takes a while."""
    threads = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(state == "T" for state in threads)


@pytest.mark.slow
def test_a_worker_that_freezes_during_the_load(model: Path, right: list[int]) -> None:
    port = free_port()
    command = [sys.executable, "-m", "llamado", "worker", "-t", "1", "-p", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None and "llamado worker on" in process.stderr.readline()
        threading.Thread(target=process.stderr.read, daemon=True).start()
        frozen = threading.Event()
        stages: list[str] = []

        def progress(what: str, done: int, total: int) -> None:
            stages.append(what)
            if what.startswith("sending weights") and not frozen.is_set():
                frozen.set()
                os.kill(process.pid, signal.SIGSTOP)
                until(lambda: _stopped(process.pid))
            elif what.startswith("waiting since"):
                os.kill(process.pid, signal.SIGCONT)

        assert load(model, f"127.0.0.1:{port}", progress) == right
        assert frozen.is_set()
        assert any("gives no sign of life for 0.7 s" in what for what in stages)
    finally:
        process.kill()
        process.wait()


# --- timeouts and logs ------------------------------------------------------------------------------------------------


def test_limits_detect_a_loss_in_time() -> None:
    for seconds in (0.1, 3.0, 30.0):
        patience = Patience.of(seconds)
        assert patience.interval + patience.answer <= seconds
        assert patience.silence + patience.interval / 2 <= seconds and patience.interval <= 1
    assert Patience.of(3.0) == pytest.approx((0.6, 2.1, 2.4, 0.75))


@pytest.mark.parametrize("value", ["1", "0"])
def test_ggml_rpc_debug_logs_requests(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GGML_RPC_DEBUG", value)
    caplog.set_level(logging.INFO, "llamado.rpc")
    with worker_at() as endpoint:
        device = connect(endpoint)[0]
        tensor = g.new_tensor(T.I8, 100_000, name="some\nbytes")
        device.place([tensor])
        import numpy as np

        device.write(tensor, np.ones(100_000, np.uint8))
        assert device.read(tensor, 0, 10).result(60).tolist() == [1] * 10
        device.close()
    sent = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"to {endpoint}: ")]
    if value == "0":
        assert not sent
        return
    words = [line.split()[2] for line in sent]
    assert words[0] == "HELLO" and {"DEVICE_COUNT", "ALLOC_BUFFER", "SET_TENSOR", "GET_TENSOR"} <= set(words)
    assert any("SET_TENSOR some?bytes" in line and "100000 bytes at 0" in line for line in sent)


def test_options_reach_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "llamado.rpc.client.workers.connect", lambda endpoint, **options: seen.append(options) or (_ for _ in ()).throw(
            WorkersUnreachable("no")))  # fmt: skip
    split = SplitOptions(rpc=("127.0.0.1:1",), connect_timeout=7.0, alive_timeout=9.0)
    backend("rpc", split.rpc, split.device_options()).connect()
    assert (seen[0]["timeout"], seen[0]["alive_timeout"]) == (7.0, 9.0)
    assert isinstance(split.device_options(), DeviceOptions)
