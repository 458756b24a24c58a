"""`/cluster/events`: one view per change for all listeners, sent as differences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from cluster_events import after_message
from fakes import FakeEngine, run, served
from test_cluster_api import FakeCluster
from waiting import GUARD

from llamado.engine.topology.view import ClusterView
from llamado.server.api.cluster.bodies import cluster_body, json_values
from llamado.server.api.cluster.events import ClusterPublisher, difference
from llamado.server.api.cluster.typescript import typescript
from llamado.server.errors import ApiError
from llamado.server.state import ServerState

SCHEMA = Path(__file__).parents[2] / "web" / "src" / "api" / "schema.ts"


def test_the_page_has_types_of_the_present_fields() -> None:
    command = "python -m llamado.server.api.cluster.typescript > web/src/api/schema.ts"
    assert SCHEMA.read_text() == typescript(), command


@pytest.mark.parametrize(("old", "new", "paths"), [
    ({"a": 1, "b": 2}, {"a": 1, "b": 2}, []),
    ({"a": 1, "b": "x" * 99}, {"a": 2, "b": "x" * 99}, ["/a"]),
    ({"a/b~": [1, "x" * 99]}, {"a/b~": [None, "x" * 99]}, ["/a~1b~0/0"]),
    ([1, 2], [1, 2, 3], [""]),
    ({"a": 1, "b": 2, "c": 3}, {"a": 4, "b": 5, "c": 6}, [""]),
    ({"a": 1}, {"b": 1}, [""]),
    (None, {"a": 1}, [""]),
])  # fmt: skip
def test_a_difference_is_the_shortest_patch(old: Any, new: Any, paths: list[str]) -> None:
    patch = difference(old, new)
    assert [one.path for one in patch] == paths
    assert after_message(old, {"patch": [asdict(one) for one in patch]}) == new


class Cluster(FakeCluster):
    n_views = 0

    def view(self) -> ClusterView:
        self.n_views += 1
        return self.now


class ManualPublisher:
    """A publisher whose clock stands still until the test moves it."""

    def __init__(self) -> None:
        self.cluster, self.now, self.ending = Cluster(), 100.0, False
        self.engine = FakeEngine()
        self.state = ServerState(served=served(self.engine, cluster=self.cluster), ending=lambda: self.ending)
        self.publisher = ClusterPublisher(self.state, lambda: self.now)

    def change_speed(self, tokens_per_second: float) -> None:
        self.cluster.now = replace(self.cluster.now, tokens_per_second=tokens_per_second)


def with_publisher(test: Callable[[ManualPublisher], Awaitable[None]]) -> None:
    found = ManualPublisher()

    async def guarded() -> None:
        async with asyncio.timeout(GUARD):
            await test(found)

    try:
        run(guarded())
    finally:
        found.engine.close()


async def message(listener: AsyncGenerator[bytes]) -> dict[str, Any]:
    return dict(orjson.loads(await anext(listener)))


def test_listeners_share_one_view_of_each_change() -> None:
    async def test(server: ManualPublisher) -> None:
        listeners = [server.publisher.listen() for _ in range(5)]
        views = [(await message(one))["cluster"] for one in listeners]
        whole = json_values(cluster_body(server.state.loaded()))
        assert views == [whole] * 5 and server.cluster.n_views == 2, "one of them is this test's"
        server.change_speed(26.0)
        server.cluster.marked += 1
        changes = await asyncio.gather(*map(message, listeners))
        assert (
            changes == [{"sequence": 2, "patch": [{"op": "replace", "path": "/tokens_per_second", "value": 26.0}]}] * 5
        )
        assert server.cluster.n_views == 3
        assert after_message(views[0], changes[0]) == whole | {"tokens_per_second": 26.0}
        for one in listeners:
            await one.aclose()

    with_publisher(test)


def test_figures_wait_for_a_second_and_other_changes_do_not() -> None:
    async def test(server: ManualPublisher) -> None:
        listener = server.publisher.listen()
        await message(listener)
        server.change_speed(26.0)
        server.now += 0.9
        server.publisher.refresh()
        assert server.cluster.n_views == 1
        server.now += 0.1
        assert (await message(listener))["sequence"] == 2
        server.cluster.marked += 1
        server.change_speed(27.0)
        assert (await message(listener))["patch"][0]["value"] == 27.0
        server.cluster.marked += 1
        server.publisher.refresh()
        assert server.cluster.n_views == 4, "a change that the view does not show is no message"
        server.change_speed(28.0)
        server.cluster.marked += 1
        assert (await message(listener))["sequence"] == 4
        await listener.aclose()

    with_publisher(test)


def test_a_listener_that_missed_a_change_gets_the_whole_view() -> None:
    async def test(server: ManualPublisher) -> None:
        listener = server.publisher.listen()
        await message(listener)
        for speed in (26.0, 27.0):
            server.change_speed(speed)
            server.publisher.refresh(force=True)
        late = await message(listener)
        assert late["sequence"] == 3 and late["cluster"]["tokens_per_second"] == 27.0
        await listener.aclose()

    with_publisher(test)


def test_nothing_is_computed_without_listeners() -> None:
    async def test(server: ManualPublisher) -> None:
        first, second = server.publisher.listen(), server.publisher.listen()
        await message(first)
        await message(second)
        polling = next(task for task in asyncio.all_tasks() if "_poll" in str(task.get_coro()))
        await first.aclose()
        assert not polling.cancelling()
        await second.aclose()
        await asyncio.wait([polling])
        assert polling.cancelled()
        server.change_speed(30.0)
        assert (await message(server.publisher.listen()))["cluster"]["tokens_per_second"] == 30.0

    with_publisher(test)


def test_streams_end_with_the_server_and_with_its_model() -> None:
    async def test(server: ManualPublisher) -> None:
        listener = server.publisher.listen()
        await message(listener)
        server.ending = True
        assert [one async for one in listener] == []
        server.ending = False
        listener = server.publisher.listen()
        await message(listener)
        server.state.served = None
        with pytest.raises(ApiError):
            await message(listener)

    with_publisher(test)
