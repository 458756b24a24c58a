"""Parts of the router without processes: whose place is taken, when models expire, entries of lists, log lines."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llamado.router import downloads as downloads_module
from llamado.router import fleet as fleets
from llamado.router.api.entries import download_entry, model_entry
from llamado.router.catalog import Catalog, Group, Launch, RoutedModel
from llamado.router.child import CRASHES
from llamado.router.downloads import Downloads
from llamado.router.fleet import LOADED, LOADING, UNLOADED, Fleet, FleetLimits, Instance, _conflict, _fits
from llamado.router.peers import Peer, Peers
from llamado.router.refusals import RefusalLog

LAUNCH = Launch(args=("serve", "-m", "x"), env={})


def instance(name: str, status: str = UNLOADED, **more: Any) -> Instance:
    """Return an instance, with a process unless it is unloaded."""
    model = {key: more.pop(key) for key in ("group", "ttl", "metadata", "title", "path") if key in more}
    child = None if status == UNLOADED else cast(Any, SimpleNamespace(args=["program"]))
    return Instance(RoutedModel(name=name, source="preset", launch=LAUNCH, **model), status=status, child=child, **more)


def in_fleet(test: Callable[[Fleet], None], *models: str, **limits: Any) -> None:
    async def run() -> None:
        catalog = Catalog([RoutedModel(name=name, source="preset", launch=LAUNCH) for name in models or ("a",)])
        fleet = Fleet(catalog, FleetLimits(**limits))
        try:
            test(fleet)
        finally:
            await fleet.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("ttl", "keep_alive", "expires_at"),
    [
        (0.0, None, math.inf),
        (-1.0, None, math.inf),
        (5.0, None, 25.0),
        (5.0, 7.0, 27.0),
        (5.0, 0.0, 20.0),
        (5.0, -1.0, math.inf),
        (0.0, 7.0, 27.0),
    ],
)
def test_times_of_unloading(ttl: float, keep_alive: float | None, expires_at: float) -> None:
    for last_used, loaded_at in ((10.0, 20.0), (20.0, 10.0)):
        one = instance("a", LOADED, ttl=ttl, keep_alive=keep_alive, last_used=last_used, loaded_at=loaded_at)
        assert one.expires_at == expires_at


def test_states_of_an_instance() -> None:
    assert instance("a", LOADED, asleep=True).shown_status == "sleeping"
    assert instance("a", LOADING, asleep=True).shown_status == LOADING and instance("a").shown_status == UNLOADED
    assert instance("a").idle and not instance("a", in_flight=1).idle and not instance("a").running
    waiting = instance("a", LOADING)
    waiting.waiters.append(cast(Any, None))
    assert not waiting.idle and waiting.running


SWAP, KEEP = Group(name="s"), Group(name="k", swap=False, exclusive=False)
PERSISTENT, EXCLUSIVE = Group(name="p", persistent=True), Group(name="e", swap=False)


@pytest.mark.parametrize(
    ("mine", "its", "conflicts"),
    [
        (SWAP, SWAP, True),
        (KEEP, KEEP, False),
        (EXCLUSIVE, EXCLUSIVE, False),
        (EXCLUSIVE, SWAP, True),
        (EXCLUSIVE, PERSISTENT, False),
        (PERSISTENT, PERSISTENT, True),
        (PERSISTENT, SWAP, True),
        (KEEP, SWAP, False),
        (None, SWAP, False),
        (SWAP, None, False),
    ],
)
def test_groups_that_exclude_each_other(mine: Group | None, its: Group | None, conflicts: bool) -> None:
    one, other = instance("a", group=mine), instance("b", group=its)
    assert _conflict(one, other) is conflicts and not _conflict(one, one)


def test_models_fit_beside_others() -> None:
    assert _fits(instance("a", need=50), 50, 100) and not _fits(instance("a", need=51), 50, 100)
    assert _fits(instance("a", need=500), 0, 100) and _fits(instance("a"), 100, 100)
    assert not _fits(instance("a", need=0), 101, 100)


def test_a_busy_model_keeps_its_place_for_as_long_as_it_took_to_load() -> None:
    def test(fleet: Fleet) -> None:
        for seconds, end in ((0.0, 102.0), (3.0, 103.0), (99.0, 108.0)):
            assert fleet._quantum_end(instance("a", loaded_at=100.0, load_seconds=seconds)) == end

    in_fleet(test, quantum=2.0, quantum_max=8.0)


def test_the_victim_is_drained_idle_or_loaded_longest() -> None:
    def test(fleet: Fleet) -> None:
        busy = [
            instance(name, LOADED, in_flight=1, loaded_at=at)
            for name, at in (("new", 99.0), ("old", 10.0), ("mid", 50.0))
        ]
        idle = [instance(name, LOADED, last_used=at) for name, at in (("late", 90.0), ("early", 20.0))]
        leaving = [instance("l", LOADING), instance("s", LOADED, stopping=True), instance("d", LOADED, draining=True)]
        assert fleet._victim([*leaving, *busy, *idle], [busy[2], idle[0]], 100.0) == (busy[2], math.inf)
        assert fleet._victim([*leaving, *busy, *idle], [], 100.0) == (idle[1], math.inf)
        assert fleet._victim([*leaving, *busy], [], 100.0) == (busy[1], math.inf)
        assert fleet._victim([busy[0]], [], 100.0) == (None, 101.0)
        assert fleet._victim([busy[0]], [], 101.0) == (busy[0], math.inf)
        assert fleet._victim(leaving, leaving, 100.0) == (None, math.inf)

    in_fleet(test, quantum=2.0)


def test_busy_models_are_drained_after_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(Fleet, "_stop", lambda self, one, **_: stopped.append(one.model.name))

    def test(fleet: Fleet) -> None:
        busy = instance("busy", LOADED, in_flight=1, loaded_at=100.0)
        assert fleet._drain(busy, 101.9) == 102.0 and not busy.draining
        assert fleet._drain(busy, 102.0) == math.inf and busy.draining
        forced = instance("forced", LOADED, in_flight=1, loaded_at=100.0)
        assert fleet._drain(forced, 100.0, forced=True) == math.inf and forced.draining
        for left_alone in (instance("l", LOADING), instance("s", LOADED, stopping=True)):
            assert fleet._drain(left_alone, 200.0) == math.inf and not left_alone.draining
        assert stopped == [] and fleet._drain(instance("idle", LOADED, loaded_at=100.0), 100.0) == math.inf
        assert stopped == ["idle"]

    in_fleet(test, quantum=2.0)


def test_the_fleet_wakes_for_the_earliest_time() -> None:
    def test(fleet: Fleet) -> None:
        fleet._wake_at(105.0, 100.0)
        first = fleet._timer
        assert first is not None and 4.0 < first.when() - fleet._loop.time() <= 5.0
        fleet._wake_at(math.inf, 100.0)
        assert fleet._timer is None and first.cancelled()
        fleet._wake_at(90.0, 100.0)
        assert fleet._timer is not None and fleet._timer.when() - fleet._loop.time() <= 0.001

    in_fleet(test)


def test_entries_of_models() -> None:
    entry = model_entry(instance("a"), 7)
    assert entry == {
        "id": "a", "aliases": [], "tags": [], "object": "model", "owned_by": "llamado", "created": 7,
        "status": {"value": "unloaded", "args": ["serve", "-m", "x"]}, "source": "preset", "can_remove": False,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    }  # fmt: skip
    for failed, code in ((True, 0), (False, 3)):
        status = model_entry(instance("a", failed=failed, exit_code=code, reason="no room"), 7)["status"]
        assert (status["exit_code"], status["failed"], status["reason"]) == (code, True, "no room")
        assert "failed" not in model_entry(instance("a", LOADED, failed=failed, exit_code=code), 7)["status"]
    info = {"id": "other", "meta": {"n": 1}, "architecture": {"input_modalities": ["image"]}, "more": 2}
    loaded = instance("a", LOADED, info=info, need=5, metadata={"k": 1}, title="T", path="/x", progress={"p": 1})
    entry = model_entry(loaded, 7)
    assert (entry["id"], entry["more"], entry["memory"], entry["path"], entry["name"]) == ("a", 2, 5, "/x", "T")
    assert entry["meta"] == {"n": 1, "llamaswap": {"k": 1}} and entry["architecture"] == info["architecture"]
    assert entry["status"] == {"value": "loaded", "args": ["program"], "progress": {"p": 1}}
    assert "more" not in model_entry(instance("a", info=info), 7)
    assert model_entry(instance("a", info={"meta": 5}, metadata={"k": 1}), 7)["meta"] == {"llamaswap": {"k": 1}}
    download = download_entry("b", {"done": 1}, 7)
    assert download["status"] == {"value": "downloading", "progress": {"done": 1}}
    assert (download["id"], download["created"], download["source"], download["can_remove"]) == ("b", 7, "cache", True)


def test_exit_codes_of_crashes() -> None:
    assert {139, 134, 136, 132} <= CRASHES and not {137, 143, 130, 1, 127, 128} & CRASHES


@pytest.mark.parametrize(
    ("status", "headers", "client", "line"),
    [
        (404, [], ("10.0.0.1", 5), "10.0.0.1 GET /x 404, 0.0 ms, no such model"),
        (400, [], None, "GET /x 400, 0.0 ms, no such model"),
        (399, [], None, None),
        (503, [(b"X-Request-Id", b"1")], None, None),
    ],
)
def test_refusals_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int, headers: Any, client: Any, line: Any
) -> None:
    monkeypatch.setattr("llamado.router.refusals.time.perf_counter", lambda: 1.0)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error":{"message":"no such model"}}', "more_body": True})
        await send({"type": "http.response.body", "body": b'{"error":{"message":"late"}}'})

    async def send(message: Any) -> None:
        sent.append(message)

    logging.getLogger("llamado").propagate = True
    scope = {"type": "http", "method": "GET", "path": "/x", "client": client}
    with caplog.at_level(logging.INFO, "llamado.router"):
        asyncio.run(RefusalLog(app)(scope, cast(Any, None), send))
    assert len(sent) == 3 and [record.getMessage() for record in caplog.records] == ([] if line is None else [line])
    assert fleets.log.name == "llamado.router"


def test_models_of_peers_by_their_shortest_names() -> None:
    peers = Peers(
        [Peer(name=name, url="http://h", models=models) for name, models in (("p", ("a", "b", "b")), ("q", ("b", "c")))]
    )
    names = {name: (found.peer.name, found.model) for name, found in peers.by_shortest_name(lambda name: name == "c")}
    assert names == {"a": ("p", "a"), "p/b": ("p", "b"), "q/b": ("q", "b"), "q/c": ("q", "c")}
    assert peers.find("b") is None and peers.find("x") is None
    one = peers.find("a")
    assert one is not None and one == peers.find("p/a")
    assert one.listed("a", 7) == {
        "id": "a", "aliases": [], "tags": [], "object": "model", "owned_by": "llamado", "created": 7,
        "status": {"value": "remote"}, "source": "peer", "can_remove": False, "name": "p: a",
        "meta": {"llamaswap": {"peerID": "p"}},
    }  # fmt: skip
    peers.close()


def test_progress_of_a_download_is_reported_at_intervals_and_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(downloads_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def fetch_model(source: Any, options: Any, *, progress: Callable[[int, int], None], warn: Any) -> None:
        steps = ((0.0, 1), (0.0625, 2), (0.03125, 3), (0.03125, 4), (0.0625, 5), (0.0, 9), (0.0625, 6), (0.125, 7))
        for seconds, done in steps:
            now[0] += seconds
            progress(done, 9)

    async def fetch() -> tuple[list[tuple[str, str, Any]], list[Any]]:
        events: list[tuple[str, str, Any]] = []
        ended = asyncio.Event()
        downloads = Downloads(lambda *event: events.append(event), ended.set)
        downloads.start("u/m")
        updates = downloads.join("u/m")
        await ended.wait()
        return events, [updates.get_nowait() for _ in range(updates.qsize())]

    monkeypatch.setattr("llamado.engine.supported.fetch_model", fetch_model)
    events, updates = asyncio.run(fetch())
    assert updates == [(1, 9), (4, 9), (9, 9), (7, 9), ""]
    progress = [("download_progress", "u/m", {"u/m": {"done": done, "total": 9}}) for done in (1, 4, 9, 7)]
    assert events == [("model_status", "u/m", {"status": "downloading"}), *progress, ("download_finished", "u/m", {})]
