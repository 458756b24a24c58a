"""Workers that join and leave a model during answers: every token as without them."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ports import free_port
from tiers import first_of
from tiny_models import make_llama
from waiting import GUARD, until
from wire_client import running

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import DeviceError, DeviceLost
from llamado.devices.split.measure import figures_of
from llamado.devices.split.placement import NotEnoughMemory, SplitOptions
from llamado.engine.forward import device_pool
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions
from llamado.engine.topology.layout import BadLayout, LayoutPart
from llamado.engine.topology.membership import BadShare, Membership, UnknownWorker
from llamado.errors import LlamadoError
from llamado.rpc.client.device import RemoteDevice
from llamado.rpc.worker.server import Worker

N_CTX = 2048
SPLIT = SplitOptions(tensor_split=(1.0,), request_wait=120.0)
"""Start without workers. This machine has one part of the layers, and so has each worker that joins."""
LOST, NO_ROOM = DeviceLost("RPC0", "the plug was pulled"), DeviceError("it has no room")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    return make_llama(path, n_embd=256, n_ff=512, n_layer=4, n_ctx=N_CTX, wtype="Q4_0")


@contextmanager
def worker(port: int = 0) -> Iterator[Worker]:
    cpu = CpuDevice(1)
    with running(cpu, port=port, mem=1 << 30) as one:
        yield one
    cpu.close()


def options(split: SplitOptions | None, n_slots: int = 2) -> EngineOptions:
    return EngineOptions(
        n_ctx=n_slots * N_CTX, n_slots=n_slots, n_threads=1, split=split, drafts=DraftOptions(kinds=())
    )


def answer(llama: LoadedModel, n: int = 24) -> list[int]:
    return [*llama.complete([1, 2, 3], n_predict=n, temperature=0.0, ignore_eos=True).tokens]


@pytest.fixture(scope="module")
def right(model: Path) -> list[int]:
    with LoadedModel.load(model, options(None)) as llama:
        return answer(llama)


def has(llama: LoadedModel) -> dict[str, str]:
    """Return the layers of each device."""
    assert llama.cluster is not None
    return {device.endpoint or "": device.holds or "" for device in llama.cluster.view().devices}


def kinds(llama: LoadedModel) -> list[str]:
    assert llama.cluster is not None
    return [event.kind for event in llama.cluster.view().events if event.kind != "moved"]


class Stream(threading.Thread):
    """An answer that goes on until it is stopped."""

    def __init__(self, llama: LoadedModel, number: int) -> None:
        super().__init__(daemon=True)
        self.tokens: list[int] = []
        self.enough = threading.Event()
        self.error: Exception | None = None
        self._llama, self._more = llama, threading.Condition()
        self.request = {"prompt": [5 + number, 9, 17 * number], "temperature": 0.8, "seed": number}

    def run(self) -> None:
        try:
            request = dict(self.request)
            for event in self._llama.events(request.pop("prompt"), n_predict=N_CTX - 16, ignore_eos=True, **request):
                with self._more:
                    self.tokens += event.tokens
                    self._more.notify_all()
                if self.enough.is_set():
                    break
        except Exception as error:
            self.error = error
            with self._more:
                self._more.notify_all()

    def go_on(self, n: int) -> None:
        """Wait for `n` more tokens."""
        with self._more:
            least = len(self.tokens) + n
            assert self._more.wait_for(lambda: len(self.tokens) >= least or self.error is not None, GUARD)
            assert self.error is None and least < N_CTX - 16, self.error


def check_alone(model: Path, streams: list[Stream]) -> None:
    """Compare the tokens with those of this machine alone, which answers all requests at once."""
    with LoadedModel.load(model, options(None, len(streams))) as alone, ThreadPoolExecutor() as pool:

        def ask(stream: Stream) -> list[int]:
            request = dict(stream.request)
            n = len(stream.tokens)
            return [*alone.complete(request.pop("prompt"), n_predict=n, ignore_eos=True, **request).tokens]

        assert [*pool.map(ask, streams)] == [stream.tokens for stream in streams]


@pytest.mark.slow
@pytest.mark.parametrize("n", first_of([4, 8]))
def test_streams_while_workers_join_and_leave(model: Path, n: int) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(worker()) for _ in range(2))
        llama = stack.enter_context(LoadedModel.load(model, options(SPLIT, n)))
        cluster = llama.cluster
        assert cluster is not None
        streams = [Stream(llama, number) for number in range(n)]
        for stream in streams:
            stream.start()

        def all_go_on() -> None:
            for stream in streams:
                stream.go_on(4)

        all_go_on()
        cluster.join(str(first.endpoint))
        all_go_on()
        cluster.join(str(second.endpoint))
        all_go_on()
        assert all(has(llama).values()) and len(has(llama)) == 3
        cluster.drain(str(first.endpoint))
        all_go_on()
        assert first.clients == 0 and str(first.endpoint) not in has(llama)
        cluster.join(str(first.endpoint))
        all_go_on()
        assert kinds(llama) == ["joined", "joined", "drained", "joined"]
        for stream in streams:
            stream.enough.set()
        for stream in streams:
            stream.join(120)
            assert stream.error is None and not stream.is_alive()
    check_alone(model, streams)


@pytest.mark.slow
def test_joining_an_unreachable_worker_changes_nothing(model: Path, right: list[int]) -> None:
    with worker() as there, LoadedModel.load(model, options(SPLIT)) as llama:
        assert llama.cluster is not None
        with pytest.raises(LlamadoError, match="is a worker running"):
            llama.cluster.join(f"127.0.0.1:{free_port()}")
        assert has(llama) == {"": "layers 0 to 3 and the head"} and answer(llama) == right
        (joined,) = llama.cluster.join(str(there.endpoint))
        assert joined.device == f"RPC0[{there.endpoint}]" and joined.holds == "layers 0 to 2"
        assert llama.cluster.join(str(there.endpoint)) == [joined], "it is there already"
        assert answer(llama) == right
        with pytest.raises(UnknownWorker):
            llama.cluster.drain("127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure", first_of([("send_ahead", LOST), ("settle", NO_ROOM), ("send_ahead", NO_ROOM), ("settle", LOST)], 2)
)
def test_a_worker_that_fails_during_the_join_changes_nothing(
    model: Path, right: list[int], failure: tuple[str, Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, error = failure
    with worker() as there, LoadedModel.load(model, options(SPLIT)) as llama:
        assert llama.cluster is not None
        tensors: Any = llama.forward._tensors  # type: ignore[attr-defined]
        done, failed = getattr(tensors, where), []

        def fails_once(*given: Any, **named: Any) -> Any:
            if not failed:
                failed.append(done(*given, **named))
                raise error
            return done(*given, **named)

        monkeypatch.setattr(tensors, where, fails_once)
        with pytest.raises(type(error)):
            llama.cluster.join(str(there.endpoint))
        assert failed and answer(llama) == right
        assert has(llama) == {"": "layers 0 to 3 and the head"} and kinds(llama) == []
        llama.cluster.join(str(there.endpoint))
        assert has(llama)[str(there.endpoint)] and answer(llama) == right


@pytest.mark.slow
def test_a_worker_stays_if_its_layers_fit_nowhere_else(model: Path, right: list[int]) -> None:
    with worker() as there, LoadedModel.load(model, options(SPLIT)) as llama:
        cluster: Any = llama.cluster
        cluster.join(str(there.endpoint))
        before, pool = has(llama), cluster._membership._pool
        whole = pool.figures[0]
        pool.figures[0] = replace(whole, free=1 << 20)
        with pytest.raises(NotEnoughMemory, match="CPU needs"):
            cluster.drain(str(there.endpoint))
        assert has(llama) == before and answer(llama) == right and there.clients
        pool.figures[0] = whole
        cluster.drain(str(there.endpoint))
        assert answer(llama) == right


@pytest.mark.slow
def test_moved_layers_free_their_memory(model: Path, right: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.engine.forward.device_tensors.GROUP", 1)
    with worker() as first, worker() as second, LoadedModel.load(model, options(SPLIT)) as llama:
        assert llama.cluster is not None
        (shared,) = first.state.devices
        llama.cluster.join(str(first.endpoint))
        assert answer(llama) == right
        alone = shared.memory()[0]
        llama.cluster.join(str(second.endpoint))
        assert answer(llama) == right
        device = next(d for d in llama.cluster.view().devices if d.endpoint == str(first.endpoint))
        layer = (device.memory.weights + device.memory.kv) // len(device.layers)
        assert shared.memory()[0] >= alone + layer // 2, "one of three layers went elsewhere"
        llama.cluster.drain(str(second.endpoint))
        assert answer(llama) == right


@pytest.mark.slow
def test_weights_are_sent_once_during_answers(model: Path, right: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    load, loaded = RemoteDevice.load, []

    def noted(self: RemoteDevice, weights: Any, progress: Any = None) -> Any:
        loaded.extend((threading.current_thread().name, self.name, tensor.name) for tensor, _ in weights)
        return load(self, weights, progress)

    monkeypatch.setattr(RemoteDevice, "load", noted)
    with worker() as first, worker() as second, LoadedModel.load(model, options(SPLIT)) as llama:
        assert llama.cluster is not None
        llama.cluster.join(str(first.endpoint))
        llama.cluster.join(str(second.endpoint))
        llama.cluster.drain(str(first.endpoint))
        assert answer(llama) == right
    assert len(loaded) > 20 and len({*loaded}) == len(loaded)
    assert {thread for thread, *_ in loaded} == {threading.current_thread().name}, "not the engine's"


@pytest.mark.slow
def test_a_joined_worker_may_die_and_return(model: Path, right: list[int]) -> None:
    port = free_port()
    with LoadedModel.load(model, options(replace(SPLIT, failover=0.0))) as llama:
        cluster = llama.cluster
        assert cluster is not None
        with worker(port) as one:
            endpoint = str(one.endpoint)
            cluster.join(endpoint)
            held = has(llama)
            assert answer(llama) == right
        assert answer(llama) == right
        states = {device.endpoint or "": device.state for device in cluster.view().devices}
        assert states == {"": "ready", endpoint: "away"} and "lost" in kinds(llama)
        with worker(port):
            stopped = threading.Event()
            while has(llama) != held:
                assert answer(llama) == right
                assert not stopped.wait(0.05)
            assert answer(llama) == right and kinds(llama)[-1] == "back"
            cluster.drain(endpoint)
            assert answer(llama) == right and has(llama) == {"": "layers 0 to 3 and the head"}


@pytest.mark.slow
def test_the_reason_for_no_layers_is_reported(model: Path, right: list[int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llamado")
    with worker() as there, LoadedModel.load(model, options(SPLIT)) as llama:
        assert llama.cluster is not None
        said = [record.getMessage() for record in caplog.records if record.name.startswith("llamado.engine")]
        assert said[-1].startswith("CPU: everything, layers 0 to 3 and the head (") and "no workers" in said[-1]
        (joined,) = llama.cluster.join(str(there.endpoint), share=0.0)
        assert joined.holds == "nothing" and "its share of --tensor-split is 0" in joined.why
        assert any(f"{joined.device}: gets no layers: its share" in record.getMessage() for record in caplog.records)
        (idle,) = (device for device in llama.cluster.view().devices if device.endpoint)
        assert (idle.state, idle.layers, idle.why) == ("idle", (), joined.why)
        assert answer(llama) == right
        llama.cluster.drain(str(there.endpoint))
        assert answer(llama) == right and there.clients == 0


@pytest.mark.slow
def test_times_of_a_token(model: Path) -> None:
    with worker() as there, LoadedModel.load(model, options(SPLIT)) as llama:
        cluster = llama.cluster
        assert cluster is not None
        (joined,) = cluster.join(str(there.endpoint), speeds=[5e9])
        answer(llama)
        # Before its measurement, a link counts as free.
        until(lambda: cluster.view().devices[1].link.pulse is not None)
        view = cluster.view()
        here, far = view.devices
        mine, theirs, total = here.token_seconds, far.token_seconds, view.token_seconds
        assert view.tokens_per_second > 0 and mine.compute > 0 and theirs.compute > 0
        assert mine.link == 0 < theirs.link < total.total
        assert total.compute == pytest.approx(mine.compute + theirs.compute)
        assert far.speed.decode == 5e9 and far.link.pulse is not None and far.link.pulse > 0
        assert (here.layers, here.head, far.layers, far.head) == ((3,), True, (0, 1, 2), False)
        assert far.holds == joined.holds == "layers 0 to 2"


def parts(llama: LoadedModel, *layers: tuple[int, ...], head: int = 0) -> list[LayoutPart]:
    """Return a layout of all devices in order."""
    assert llama.cluster is not None
    names = [device.device for device in llama.cluster.view().devices]
    return [LayoutPart(name, of, number == head) for number, (name, of) in enumerate(zip(names, layers, strict=True))]


@pytest.mark.slow
def test_a_manual_layout_during_streams(model: Path, right: list[int]) -> None:
    with worker() as first, worker() as second:
        split = replace(SPLIT, rpc=(str(first.endpoint), str(second.endpoint)), tensor_split=(1.0, 1.0, 1.0))
        with LoadedModel.load(model, options(split, 4)) as llama:
            cluster = llama.cluster
            assert cluster is not None
            streams = [Stream(llama, n) for n in range(3)]
            for stream in streams:
                stream.start()
            before = cluster.mark()
            for layout in (((0,), (1, 2), (3,), 2), ((), (0, 1, 2, 3), (), 1), ((0, 1), (3,), (2,), 0)):
                *layers, head = layout
                for stream in streams:
                    stream.go_on(4)
                cluster.lay_out(parts(llama, *layers, head=head))
                view = cluster.view()
                assert [device.layers for device in view.devices] == layers
                assert [device.head for device in view.devices] == [n == head for n in range(3)]
                assert cluster.mark() != before
                assert all((d.state, d.why) == ("idle", "layers were laid out without it") for d in view.devices
                           if not d.layers and not d.head and d.endpoint)  # fmt: skip
            for stream in streams:
                stream.go_on(4)
                stream.enough.set()
            for stream in streams:
                stream.join()
            assert answer(llama) == right
    check_alone(model, streams)


@pytest.mark.full
def test_a_prediction_measures_unknown_devices_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = device_pool.measure_all
    monkeypatch.setattr(device_pool, "measure_all", lambda d, **k: (asked.append(len(d)), real(d, **k))[1])
    with worker() as one:
        split = replace(SPLIT, rpc=(str(one.endpoint),), tensor_split=(1.0, 1.0))
        with LoadedModel.load(model, options(split)) as llama:
            cluster = llama.cluster
            assert cluster is not None and cluster.view().predicted_seconds is None
            layout = parts(llama, (0,), (1, 2, 3), head=1)
            found = cluster.predict(layout)
            assert cluster.predict(layout) == found and asked == [2], "measured once"
            here, there = found.devices
            assert found.seconds is not None and here.seconds.compute and there.seconds.compute
            assert there.seconds.link > 0 == here.seconds.link
            assert found.seconds == pytest.approx(here.seconds.compute + there.seconds.compute + there.seconds.link)
            assert there.memory.weights > 2 * here.memory.weights > 0 == there.memory.missing
            cluster.lay_out(layout)
            assert cluster.view().predicted_seconds == pytest.approx(found.seconds)


@pytest.mark.slow
def test_impossible_layouts_change_nothing(model: Path, right: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_pool, "measure_all", lambda devices, **_: [*map(figures_of, devices)])
    with worker() as one:
        split = replace(SPLIT, rpc=(str(one.endpoint),), tensor_split=(1.0, 1.0))
        with LoadedModel.load(model, options(split)) as llama:
            cluster = llama.cluster
            assert cluster is not None
            before = has(llama)
            for wrong, why in (
                (parts(llama, (0, 1), (1, 2, 3)), "layer 1 is named twice"),
                (parts(llama, (0, 1), (3,)), "layer 2 is on no device"),
                (parts(llama, (0, 1), (2, 3, 4)), "no layer 4"),
                (parts(llama, (0, 1), (2, 3), head=9), "on no device"),
                ([LayoutPart("RPC7", (0, 1, 2, 3), True)], "no device RPC7"),
            ):
                for ask in (cluster.lay_out, cluster.predict):
                    with pytest.raises(BadLayout, match=why):
                        ask(wrong)
            pool = llama.cluster._layouts._pool  # type: ignore[union-attr]
            pool.figures[1] = replace(pool.figures[1], free=1 << 10)
            with pytest.raises(NotEnoughMemory):
                cluster.lay_out(parts(llama, (), (0, 1, 2, 3), head=1))
            assert cluster.predict(parts(llama, (), (0, 1, 2, 3), head=1)).devices[1].memory.missing > 0
            assert has(llama) == before and answer(llama) == right


class FrozenPool:
    """A pool that reaches no worker until it is released."""

    members: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.asked, self.thawed = threading.Event(), threading.Event()

    def reach(self, endpoint: str, speeds: object) -> list[Any]:
        self.asked.set()
        assert self.thawed.wait(GUARD)
        raise DeviceError("it does not answer")


def test_a_worker_that_freezes_during_the_join_blocks_nothing() -> None:
    pool = FrozenPool()
    membership = Membership(pool, SimpleNamespace(recovery=None), None)  # type: ignore[arg-type]
    failed: list[LlamadoError] = []

    def join() -> None:
        try:
            membership.join("h:1")
        except LlamadoError as error:
            failed.append(error)

    joining = threading.Thread(target=join, daemon=True)
    joining.start()
    assert pool.asked.wait(GUARD)
    with pytest.raises(UnknownWorker):
        membership.drain("h:2")
    pool.thawed.set()
    joining.join(GUARD)
    assert "it does not answer" in str(failed[0])


@pytest.mark.parametrize("share", [math.inf, math.nan, -1.0, 1e300])
def test_invalid_shares_are_rejected(share: float) -> None:
    membership = Membership(FrozenPool(), SimpleNamespace(recovery=None), None)  # type: ignore[arg-type]
    with pytest.raises(BadShare, match="h:1 asks for a share of"):
        membership.join("h:1", share)
