"""The fleet alone: limits, downloads, sleep, changing catalogs."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from router_process import FAKE, Start, config, fake
from waiting import GUARD, until

from llamado.engine.options import ModelSource
from llamado.gguf.errors import SourceError
from llamado.router import fleet as fleets
from llamado.router.api.entries import model_entry
from llamado.router.api.live import _model_json
from llamado.router.catalog import Catalog, CatalogError, Launch, RoutedModel
from llamado.router.child import Child
from llamado.router.fleet import Fleet, FleetLimits, Instance
from llamado.router.presets import environment
from llamado.server.errors import ApiError


def model(name: str, *options: str, **more: Any) -> RoutedModel:
    """Return a fake model on a Unix socket, like llamado's own servers."""
    # The fleet appends `--host SOCKET`.
    code = f"import sys; sys.argv = [{FAKE!r}, {name!r}, sys.argv[-1], *{list(options)!r}]; exec(open({FAKE!r}).read())"
    launch = Launch(args=(sys.executable, "-S", "-c", code), env=environment(), stop_timeout=0.5)
    return RoutedModel(name=name, source="preset", launch=launch, **more)


def run(
    models: list[RoutedModel],
    work: Callable[[Fleet], Coroutine[Any, Any, None]],
    need_of: Callable[[RoutedModel], int] = lambda model: 0,
    **limits: Any,
) -> None:
    """Run `work` with a fleet and close the fleet."""

    async def main() -> None:
        fleet = Fleet(Catalog(models), FleetLimits(**limits), need_of=need_of)
        try:
            await asyncio.wait_for(work(fleet), GUARD)
        finally:
            await fleet.close()
            assert not any(instance.running for instance in fleet.instances.values())

    asyncio.run(main())


@pytest.mark.slow
def test_the_queue_is_bounded() -> None:
    async def work(fleet: Fleet) -> None:
        a, b = fleet.instances["a"], fleet.instances["b"]
        lease = await fleet.acquire(a)
        waiting = [asyncio.ensure_future(fleet.acquire(b)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="3 requests wait") as caught:
            await fleet.acquire(b)
        assert caught.value.status == 503 and caught.value.retry_after
        # A request that gives up makes room for another.
        waiting.pop().cancel()
        await asyncio.sleep(0.01)
        waiting.append(asyncio.ensure_future(fleet.acquire(b)))
        await asyncio.sleep(0)
        lease.release()
        leases = [await one for one in waiting]
        assert not a.running and b.in_flight == 3
        for one in leases:
            one.release()
            one.release()
        assert b.in_flight == 0

    run([model("a"), model("b")], work, models_max=1, waiting=3)


def running(fleet: Fleet) -> str:
    return "".join(name for name, instance in fleet.instances.items() if instance.running)


@pytest.mark.slow
def test_models_make_room_by_the_memory_they_need(caplog: pytest.LogCaptureFixture) -> None:
    needs = {"a": 60, "b": 30, "c": 50, "d": 500, "e": 0}
    asked: list[str] = []

    def need_of(model: RoutedModel) -> int:
        asked.append(model.name)
        return needs[model.name] << 20

    async def work(fleet: Fleet) -> None:
        async def use(name: str) -> str:
            (await fleet.acquire(fleet.instances[name])).release()
            return running(fleet)

        assert [await use(name) for name in "abec"] == ["a", "ab", "abe", "bce"]  # `a` was unused for longest
        assert fleet.instances["c"].need == 50 << 20
        assert await use("b") == "bce"
        assert await use("a") == "abe"  # 30 + 60 just fit; `c` had to go, though `e` was unused for longer
        assert await use("d") == "de"
        assert await use("a") == "ae"
        assert sorted(asked) == list("abcde")

    run([model(name) for name in needs], work, need_of, models_max=0, memory=90 << 20)
    assert "model d: needs 500 MiB, more than the 90 MiB for all models: it is loaded alone" in caplog.text


@pytest.mark.slow
def test_a_busy_model_keeps_its_memory() -> None:
    async def work(fleet: Fleet) -> None:
        lease = await fleet.acquire(fleet.instances["a"])
        waiting = asyncio.ensure_future(fleet.acquire(fleet.instances["b"]))
        while fleet.instances["b"].need is None or not fleet.instances["a"].draining:
            await asyncio.sleep(0.001)
        assert running(fleet) == "a" and not waiting.done()
        lease.release()
        (await waiting).release()
        assert running(fleet) == "b"

    run([model("a"), model("b")], work, lambda model: 60, memory=100, quantum=0.0)


def test_an_unknown_memory_need_counts_as_zero(caplog: pytest.LogCaptureFixture) -> None:
    async def work(fleet: Fleet) -> None:
        (await fleet.acquire(fleet.instances["a"])).release()
        assert fleet.instances["a"].need == 0

    def fails(model: RoutedModel) -> int:
        raise RuntimeError("no such thing")

    run([model("a")], work, fails, memory=100)
    assert "model a: memory need unknown" in caplog.text


def test_waiting_times_out() -> None:
    async def work(fleet: Fleet) -> None:
        lease = await fleet.acquire(fleet.instances["a"])
        fleet.limits = replace(fleet.limits, patience=0.1)
        with pytest.raises(ApiError, match="no place for model 'b'") as caught:
            await fleet.acquire(fleet.instances["b"])
        assert caught.value.status == 503
        # No request waits for `b` any more, so `a` stays.
        (await fleet.acquire(fleet.instances["a"])).release()
        lease.release()

    run([model("a"), model("b")], work, models_max=1, quantum=0.0)


@pytest.mark.slow
def test_first_come_first_served() -> None:
    """Waiting models get places in the order of their first requests."""

    async def work(fleet: Fleet) -> None:
        order: list[str] = []

        async def use(name: str) -> None:
            lease = await fleet.acquire(fleet.instances[name])
            order.append(name)
            await asyncio.sleep(0.05)
            lease.release()

        tasks = []
        for name in "abcdab":
            tasks.append(asyncio.ensure_future(use(name)))
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        assert "".join(order) == "aabbcd"

    run([model(name) for name in "abcd"], work, models_max=1, quantum=0.0)


@pytest.mark.slow
def test_a_changed_catalog() -> None:
    async def work(fleet: Fleet) -> None:
        for name in "abc":
            (await fleet.acquire(fleet.instances[name])).release()
        kept = fleet.instances["a"].child
        fleet.instances["d"].failed, fleet.instances["d"].retry_at = True, math.inf
        told: list[Any] = []
        fleet._notify = lambda *event: told.append(event)
        fleet.replace(Catalog([model("a"), model("b", "ready=0.01"), model("d")]))
        assert told == [("models_reload", "*", None)]
        assert not fleet.instances["d"].failed and fleet.instances["d"].retry_at == 0.0  # it is tried again
        assert sorted(fleet.instances) == ["a", "b", "c", "d"]  # `c` is still stopping
        assert fleet.find("c") is None
        while fleet.instances["b"].running or "c" in fleet.instances:
            await asyncio.sleep(0.01)
        assert fleet.instances["a"].child is kept and sorted(fleet.instances) == ["a", "b", "d"]
        (await fleet.acquire(fleet.instances["b"])).release()

    run([model(name) for name in "abcd"], work)


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the fleet's clock."""
    clock = Clock()
    monkeypatch.setattr(fleets, "time", clock)
    return clock


def test_an_idle_model_is_unloaded_its_ttl_after_its_last_use_or_after_loading() -> None:
    """A model that takes longer to load than its ttl is not unloaded right after loading."""
    instance = Instance(model("a", ttl=10.0))
    instance.last_used, instance.loaded_at = 100.0, 130.0
    assert instance.expires_at == 140.0
    instance.last_used = 200.0
    assert instance.expires_at == 210.0
    instance.keep_alive = 5.0
    assert instance.expires_at == 205.0


def test_keep_alive_is_forgotten_when_the_model_is_unloaded() -> None:
    async def work(fleet: Fleet) -> None:
        a = fleet.instances["a"]
        (await fleet.acquire(a)).release()
        a.keep_alive = 5.0
        fleet.unload(a)
        await fleet.wait_unloaded([a])
        assert not a.running and a.keep_alive is None

    run([model("a")], work)


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:9"])
def test_only_idle_models_on_the_router_s_sockets_are_killed_soon(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program with an address of its own may have work that the router does not know of."""
    monkeypatch.setattr("llamado.router.child.IDLE_STOP", 0.0)
    signals: list[int] = []

    async def stop() -> None:
        given = model("a")
        given = replace(given, launch=replace(given.launch, url=url, stop_timeout=GUARD))
        child = Child(given, tmp_path, 1, cast(Any, None), lambda child: None)

        class FakeProcess:
            pid = 1

            def signal(self, sig: int) -> None:
                signals.append(sig)
                if url or sig == signal.SIGKILL:  # the other one does not end in time
                    asyncio.get_running_loop().call_later(0.05, child._finish, 0)

        child._process = cast(Any, FakeProcess())
        await child.stop(idle=True)

    asyncio.run(stop())
    assert signals == ([signal.SIGTERM] if url else [signal.SIGTERM, signal.SIGKILL])


def test_a_model_counts_as_idle_when_it_is_stopped_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    idle: list[bool] = []
    stop = Child.stop

    async def noted(child: Child, **how: bool) -> None:
        idle.append(how["idle"])
        await stop(child, at_once=True)

    async def work(fleet: Fleet) -> None:
        monkeypatch.setattr(Child, "stop", noted)
        instance = fleet.instances["a"]
        for is_busy in (True, False):
            lease = await fleet.acquire(instance)
            if not is_busy:
                lease.release()
            fleet._stop(instance)
            await fleet.wait_unloaded([instance])
            lease.release()
        monkeypatch.undo()

    run([model("a")], work)
    assert idle == [False, True]


@pytest.mark.slow
def test_only_idle_models_are_unloaded() -> None:
    async def work(fleet: Fleet) -> None:
        a, b = fleet.instances["a"], fleet.instances["b"]
        lease = await fleet.acquire(b)
        (await fleet.acquire(a)).release()
        while a.running:
            await asyncio.sleep(0.01)
        assert b.running and a.crashes == 0  # the lease is older than the ttl
        lease.release()
        while b.running:
            await asyncio.sleep(0.01)
        (await fleet.acquire(a)).release()

    run([model("a", ttl=0.01), model("b", ttl=0.01)], work)


def test_reading_requests_do_not_keep_a_model_loaded(clock: Clock) -> None:
    async def work(fleet: Fleet) -> None:
        instance = fleet.instances["a"]
        instance.status, instance.child = fleets.LOADED, cast(Child, object())
        (await fleet.acquire(instance)).release()
        assert instance.last_used == 1000.0
        clock.now = 1005.0
        look = await fleet.acquire(instance, count=False)
        clock.now = 1006.0
        look.release()
        assert instance.last_used == 1000.0
        use = await fleet.acquire(instance)
        assert instance.last_used == 1006.0
        clock.now = 1007.0
        use.release()
        assert instance.last_used == 1007.0
        instance.child = None

    run([model("a")], work)


@pytest.mark.parametrize("count", [True, False])
def test_a_request_that_waits_for_a_load_keeps_the_model_only_if_it_counts(clock: Clock, count: bool) -> None:
    async def work(fleet: Fleet) -> None:
        instance = fleet.instances["a"]
        instance.status, instance.child = fleets.LOADING, cast(Child, object())
        waiting = asyncio.create_task(fleet.acquire(instance, count=count))
        await asyncio.sleep(0)
        instance.status = fleets.LOADED
        fleet._grant(instance)
        lease = await waiting
        clock.now = 1005.0
        lease.release()
        assert instance.last_used == (1005.0 if count else 0.0) and instance.in_flight == 0
        instance.child = None

    run([model("a")], work)


@pytest.mark.slow
def test_failed_loads_back_off(clock: Clock) -> None:
    async def work(fleet: Fleet) -> None:
        instance = fleet.instances["a"]
        waits = []
        for _ in range(6):
            with pytest.raises(ApiError, match="failed to load"):
                await fleet.acquire(instance)
            waits.append(instance.retry_at - clock.now)
            # Until then it is not started, and Retry-After gives the remaining time.
            clock.now = instance.retry_at - 0.25
            with pytest.raises(ApiError, match="failed to load") as refused:
                await fleet.acquire(instance)
            assert refused.value.retry_after == 1 and not instance.running
            clock.now = instance.retry_at
        assert waits == [0.5, 1, 2, 4, 5, 5]

    run([model("a", "fail=3")], work, backoff=0.5, backoff_max=5.0)


@pytest.mark.slow
def test_restarts_back_off(clock: Clock) -> None:
    async def work(fleet: Fleet) -> None:
        instance = fleet.instances["a"]

        async def dies() -> float:
            """Let the model run and die; return the seconds until it is started again."""
            lease = await fleet.acquire(instance)
            lease.child.signal(signal.SIGKILL)
            await lease.child.exit
            lease.release()
            await asyncio.sleep(0)
            wait = instance.retry_at - clock.now
            assert instance.running == (wait == 0)
            clock.now = instance.retry_at
            return wait

        # The first restart is immediate.
        assert [await dies() for _ in range(6)] == [0, 0.5, 1, 2, 3, 3]
        # After a stable run the delays start again.
        (await fleet.acquire(instance)).release()
        clock.now += 10.5
        assert [await dies() for _ in range(3)] == [0, 0.5, 1]

    run([model("a")], work, backoff=0.5, backoff_max=3.0, stable=10.0)


def test_nothing_stays_of_an_earlier_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(fleet: Fleet) -> None:
        async def load(instance: Instance, child: Child) -> None:
            pass

        monkeypatch.setattr(fleet, "_load", load)
        instance = fleet.instances["a"]
        instance.failed, instance.exit_code, instance.reason = True, 3, "it died with exit code 3"
        instance.info, instance.progress, instance.load_requested = {"id": "old"}, {"value": 0.5}, True
        assert model_entry(instance, 0)["status"]["exit_code"] == 3 and "failure" in _model_json(instance)
        fleet._start(instance)
        assert "failure" not in _model_json(instance)
        assert instance.status == "loading" and not instance.load_requested and not instance.info
        assert model_entry(instance, 0)["status"].keys() == {"value", "args"}
        instance.stopping = instance.draining = instance.asleep = True
        instance.keep_alive, instance.progress = 5.0, {"value": 0.5}
        fleet._reset(instance)
        assert not (instance.stopping or instance.draining or instance.asleep or instance.running)
        assert instance.keep_alive is None and _model_json(instance)["state"] == "unloaded"
        assert model_entry(instance, 0)["status"].keys() == {"value", "args"}
        instance.removed = True
        fleet._reset(instance)
        assert not fleet.instances

    run([model("a")], work)


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_model_unloaded_while_loading_stays_unloaded(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The model is unloaded after its process became ready, or while its description is fetched."""

    async def work(fleet: Fleet) -> None:
        instance = fleet.instances["a"]
        told: list[Any] = []
        fleet._notify = lambda event, name, data: told.append(data["status"])
        ended = asyncio.Event()

        async def ask(instance: Instance, child: Child) -> dict[str, Any]:
            fleet.unload(instance)
            if when == "before":
                await asyncio.wait([child.exit])
            ended.set()
            return {}

        monkeypatch.setattr(fleet, "_ask_info", ask)
        with pytest.raises(ApiError, match="is not running"):
            await fleet.acquire(instance)
        await ended.wait()
        await fleet.wait_unloaded([instance])
        await asyncio.sleep(0)
        assert told == ["loading", "unloaded"]
        assert (instance.status, instance.child, instance.failed, fleet.swaps) == ("unloaded", None, False, 0)

    run([model("a")], work)


def test_events_of_a_model_that_dies_and_is_unloaded() -> None:
    async def work(fleet: Fleet) -> None:
        told: list[tuple[str, str, Any]] = []
        fleet._notify = lambda *event: told.append(event)
        instance = fleet.instances["a"]
        lease = await fleet.acquire(instance)
        lease.child.signal(signal.SIGKILL)
        await lease.child.exit
        lease.release()
        (await fleet.acquire(instance)).release()
        info = instance.info
        fleet.unload(instance)
        await fleet.wait_unloaded([instance])
        await asyncio.sleep(0)
        loading, loaded = ("model_status", {"status": "loading"}), ("status_change", {"status": "loaded", "info": info})
        died, unloaded = (("status_change", {"status": "unloaded", "exit_code": code}) for code in (137, 0))
        assert {name for _, name, _ in told} == {"a"}
        assert [(event, data) for event, _, data in told] == [loading, loaded, died, loading, loaded, unloaded]
        assert (fleet.swaps, instance.restarts) == (2, 1)

    run([model("a")], work)


def test_events_of_a_model_that_does_not_load() -> None:
    async def work(fleet: Fleet) -> None:
        told: list[tuple[str, str, Any]] = []
        fleet._notify = lambda *event: told.append(event)
        with pytest.raises(ApiError, match="failed to load"):
            await fleet.acquire(fleet.instances["a"])
        assert told == [
            ("model_status", "a", {"status": "loading"}),
            ("status_change", "a", {"status": "unloaded", "exit_code": 3}),
        ]

    run([model("a", "fail=3")], work)


def test_nothing_is_started_once_the_fleet_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(fleet: Fleet) -> None:
        started: list[Child] = []
        monkeypatch.setattr(Child, "start", started.append)
        instance = fleet.instances["a"]
        fleet._start(instance)
        fleet._closed = True
        while instance.running:
            await asyncio.sleep(0)
        assert not started and instance.reason == "it was unloaded"

    run([model("a")], work)


@pytest.mark.parametrize("is_watched", [False, True])
def test_sleeping_models(is_watched: bool) -> None:
    """Sleep is shown, and checked without waking the model."""

    async def work(fleet: Fleet) -> None:
        instance = fleet.instances["a"]
        told: list[Any] = []
        asleep = asyncio.Event()

        def note(*event: Any) -> None:
            told.append(event)
            if instance.asleep:
                asleep.set()

        fleet._notify = note
        lease = await fleet.acquire(instance)
        body = b'{"sleep": 1}'
        connection = await lease.child.pool.connect()
        connection.send(b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body), body)
        await connection.wait_for_response()
        connection.release()
        lease.release()
        if not is_watched:
            await fleet.update_sleep(instance)
        await asleep.wait()
        assert instance.shown_status == "sleeping" and told[-1] == ("status_change", "a", {"status": "sleeping"})

    run([model("a", sleeps=True)], work, sleep_check=0.01 if is_watched else 60.0)


def test_too_many_preloaded_models(start_router: Start, tmp_path: Path) -> None:
    (tmp_path / "p.ini").write_text("[*]\nload-on-startup = 1\n[a]\nmodel = a\n[b]\nmodel = b\n")
    with pytest.raises(CatalogError, match="2 models are to be loaded on startup, and --models-max is 1: a, b"):
        start_router(None, "--models-preset", str(tmp_path / "p.ini"), "--models-max", "1")


def test_downloads(start_router: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Progress is shown, a download can be cancelled, its end is reported, and its model can be deleted."""
    from llamado.router import catalog

    go = tmp_path / "go"
    cached: dict[str, Any] = {}

    def fetch_model(source: ModelSource, options: object, *, progress: Any, warn: Any) -> Path:
        done = 0
        while not go.exists():
            done += 1
            progress(done, 100_000)
            time.sleep(0.01)
        if source.hf_repo == "u/bad":
            raise SourceError("there is no such thing")
        cached["u/good:Q8_0"] = {"hf_repo": ("u/good:Q8_0",)}
        return tmp_path

    monkeypatch.setattr("llamado.engine.supported.fetch_model", fetch_model)
    monkeypatch.setattr(catalog, "cached_models", lambda: dict(cached))
    (tmp_path / "models").mkdir()
    router = start_router(None, "--models-dir", str(tmp_path / "models"))

    def names() -> set[str]:
        return {m["id"] for m in router.http.get("/models").json()["data"]}

    for name in ("u/good:Q8_0", "u/stop", "u/bad"):
        assert router.http.post("/models", json={"model": name}).json() == {"success": True}
    assert router.http.post("/models", json={"model": "u/bad"}).status_code == 400
    status = until(lambda: (s := router.status("u/good:Q8_0")).get("progress") and s)
    assert status["value"] == "downloading" and status["progress"]["u/good:Q8_0"]["total"] == 100_000
    assert router.http.post("/models/unload", json={"model": "u/stop"}).json() == {"success": True}
    until(lambda: "u/stop" not in names())
    go.touch()
    until(lambda: "u/bad" not in names())
    listed = until(lambda: [m for m in router.http.get("/models").json()["data"] if "args" in m["status"]])
    assert listed[0]["id"] == "u/good:Q8_0" and listed[0]["can_remove"] and listed[0]["source"] == "cache"
    cached.clear()
    assert router.http.delete("/models?model=u/good:Q8_0").json() == {"success": True}
    assert names() == set()


def test_aliases_in_the_list(start_router: Start) -> None:
    aliases = ["x", {"id": "y", "name": "Y"}, {"id": "z", "unlisted": True}]
    entry = fake("A", aliases=aliases, metadata={"k": 1}) | {"name": "The A"}
    router = start_router(config({"a": entry}, includeAliasesInList=True))
    listed = {m["id"]: m for m in router.http.get("/v1/models").json()["data"]}
    assert set(listed) == {"a", "x", "y"} and [listed[i]["name"] for i in "axy"] == ["The A", "The A", "Y"]
    assert listed["a"]["meta"] == {"llamaswap": {"k": 1}}
