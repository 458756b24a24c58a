"""Endpoints of `/cluster`: the view, joins, drains and layouts."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, run, served
from prometheus_client.parser import text_string_to_metric_families
from waiting import GUARD

from llamado.devices.split.placement import NotEnoughMemory
from llamado.engine.forward.events import ClusterEvent
from llamado.engine.topology.layout import (
    BadLayout,
    LayoutPart,
    LayoutPrediction,
    PartMemory,
    PartPrediction,
    PartTime,
)
from llamado.engine.topology.membership import JoinedWorker, UnknownWorker
from llamado.engine.topology.observer import Mark
from llamado.engine.topology.view import (
    ClusterView,
    DeviceMemory,
    DeviceView,
    Link,
    ModelTokenTime,
    PredictedToken,
    ReadSpeed,
    TokenTime,
)
from llamado.errors import LlamadoError
from llamado.http.access import AccessRules
from llamado.server.app import create_app
from llamado.server.state import ServerState
from llamado.server.switches import Switches

HERE = DeviceView(
    "CPU", None, "ready", None, (0,), True, "layer 0 and the head",
    DeviceMemory(10, 0, 20, 30, 1000, 2000), ReadSpeed(1e9, 2e9), ("RPC1[h:2]",), Link(None, None, None),
    TokenTime(0.01, 0.0, 0.002), PredictedToken(0.009, 0, 1),
)  # fmt: skip
FAR = DeviceView(
    "RPC0[h:1]", "h:1", "lost", "it reset the connection", (1, 2), False, "layers 1 to 2",
    DeviceMemory(1, 0, 2, 3, 4, 5), ReadSpeed(None, None), (), Link(0.003, 1e8, 0.00123456),
    TokenTime(0.02, 0.001, 0.0), PredictedToken(None, 0, 0),
)  # fmt: skip
VIEW = ClusterView(
    (HERE, FAR), 25.0, ModelTokenTime(0.03, 0.001, 0.002, 0.04), 0.012,
    (ClusterEvent(1e9, "lost", "RPC0[h:1]", "gone"),),
)  # fmt: skip


class FakeCluster:
    def __init__(self) -> None:
        self.joined: list[tuple[str, float, list[float | None]]] = []
        self.drained: list[str] = []
        self.error: LlamadoError | None = None
        self.laid_out: list[list[LayoutPart]] = []
        self.now = VIEW
        self.marked = 0

    def view(self) -> ClusterView:
        return self.now

    def mark(self) -> Mark:
        return (self.marked,)

    def predict(self, parts: Sequence[LayoutPart]) -> LayoutPrediction:
        if self.error is not None:
            raise self.error
        return LayoutPrediction(None, (PartPrediction("CPU", PartMemory(1, 2, 3, 4, 5), PartTime(0.25, 0.0)),))

    def lay_out(self, parts: Sequence[LayoutPart]) -> None:
        if self.error is not None:
            raise self.error
        self.laid_out.append([*parts])

    def join(self, endpoint: str, share: float = 1.0, speeds: Sequence[float | None] = ()) -> list[JoinedWorker]:
        self.joined.append((endpoint, share, [*speeds]))
        if self.error is not None:
            raise self.error
        return [JoinedWorker("RPC1", "nothing", "it is slow")]

    def drain(self, endpoint: str) -> None:
        self.drained.append(endpoint)
        if self.error is not None:
            raise self.error


class Server:
    def __init__(self, engine: FakeEngine, token: str | None = "secret", keys: tuple[bytes, ...] = ()) -> None:
        self.cluster = FakeCluster()
        self.state = ServerState(
            served=served(engine, cluster=self.cluster),
            switches=Switches(cluster_token=token, metrics=True),
            access=AccessRules(api_keys=keys),
        )

    def ask(
        self, method: str, path: str, body: Any = None, token: str | None = "secret",
        client: str = "10.0.0.9", more: Mapping[str, str] | None = None,
    ) -> httpx.Response:  # fmt: skip
        found: list[httpx.Response] = []

        async def asking() -> None:
            transport = httpx.ASGITransport(app=create_app(self.state), client=(client, 1234))
            headers = {**(more or {}), **({} if token is None else {"X-Cluster-Token": token})}
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as one:
                found.append(await one.request(method, path, json=body, headers=headers))

        run(asking())
        return found[0]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


def test_the_view_has_every_field_of_its_devices(engine: FakeEngine) -> None:
    body = Server(engine).ask("GET", "/cluster").json()
    here, far = body["devices"]
    assert here == {
        "device": "CPU", "endpoint": None, "state": "ready", "why": None, "layers": [0], "head": True,
        "holds": "layer 0 and the head",
        "memory": {
            "weights": 10, "own_disk": 0, "kv": 20, "compute": 30, "free": 1000, "total": 2000, "free_now": None,
        },
        "speed": {"decode": 1e9, "prefill": 2e9},
        "passes_to": ["RPC1[h:2]"],
        "link": {"round_trip": None, "bandwidth": None, "pulse": None},
        "token_seconds": {"compute": 0.01, "link": 0.0, "waiting": 0.002},
        "predicted": {"seconds": 0.009, "bytes": 0, "runs": 1},
        "utilization": None,
    }  # fmt: skip
    assert body["predicted_seconds"] == 0.012 and far["predicted"]["seconds"] is None
    assert (far["state"], far["why"], far["layers"]) == ("lost", "it reset the connection", [1, 2])
    assert far["link"] == {"round_trip": 0.003, "bandwidth": 1e8, "pulse": 0.001235}, "microseconds"
    assert body["token_seconds"] == {"total": 0.04, "compute": 0.03, "link": 0.001, "waiting": 0.002}
    assert body["tokens_per_second"] == 25.0
    assert body["events"] == [{"at": 1e9, "kind": "lost", "device": "RPC0[h:1]", "what": "gone"}]


def test_a_model_that_is_not_split_has_no_devices(engine: FakeEngine) -> None:
    server = Server(engine)
    server.state.served = served(engine)
    answer = server.ask("GET", "/cluster")
    assert answer.status_code == 200 and answer.json()["devices"] == []
    assert "llamado_worker_" not in server.ask("GET", "/metrics").text


def test_memory_and_utilization_of_a_card(engine: FakeEngine) -> None:
    server = Server(engine)
    card = replace(HERE, device="CUDA0", memory=replace(HERE.memory, free_now=600), utilization=0.25)
    server.cluster.now = replace(VIEW, devices=(HERE, card, FAR))
    shown = server.ask("GET", "/cluster").json()["devices"]
    assert [one["memory"]["free_now"] for one in shown] == [None, 600, None]
    assert [one["utilization"] for one in shown] == [None, 0.25, None]
    text = server.ask("GET", "/metrics").text
    assert re.findall(r"^llamado_worker_(?:free_now_bytes|utilization_ratio)\{.*$", text, re.MULTILINE) == [
        'llamado_worker_free_now_bytes{device="CUDA0",endpoint=""} 600.0',
        'llamado_worker_utilization_ratio{device="CUDA0",endpoint=""} 0.25',
    ]


def test_metrics_have_samples_of_each_device(engine: FakeEngine) -> None:
    text = Server(engine).ask("GET", "/metrics").text
    found = {
        (s.name.removeprefix("llamado_worker_"), s.labels["device"], s.labels.get("state")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name.startswith("llamado_worker_")
    }
    far = "RPC0[h:1]"
    assert found["up", "CPU", None] == 1 and found["up", far, None] == 0
    assert found["layers", far, None] == 2 and found["bytes", "CPU", None] == 60
    assert found["round_trip_seconds", far, None] == 0.00123456 and ("round_trip_seconds", "CPU", None) not in found
    assert found["bandwidth_bytes_per_second", far, None] == 1e8
    assert found["state", far, "lost"] == 1 and found["state", far, "ready"] == 0
    assert found["token_link_seconds", far, None] == 0.001
    assert all(s.labels["endpoint"] == "h:1" for f in text_string_to_metric_families(text) for s in f.samples
               if s.labels.get("device") == far)  # fmt: skip


def test_a_worker_joins_and_leaves(engine: FakeEngine) -> None:
    server = Server(engine, keys=(b"a key",))
    body = {"endpoint": "h:1", "share": 2, "devices": [{"decode": 5e9}, {"decode": None}]}
    answer = server.ask("POST", "/cluster/join", body)
    assert answer.json() == {
        "endpoint": "h:1", "devices": [{"device": "RPC1", "holds": "nothing", "why": "it is slow"}]
    }  # fmt: skip
    assert server.cluster.joined == [("h:1", 2.0, [5e9, None])], "the token replaces the API key"
    assert server.ask("POST", "/cluster/drain", {"endpoint": "h:1"}).json() == {"endpoint": "h:1", "drained": True}
    assert server.cluster.drained == ["h:1"]
    assert server.ask("GET", "/cluster").status_code == 401, "the view requires the API key"


@pytest.mark.parametrize("path", ["/cluster/join", "/cluster/drain"])
@pytest.mark.parametrize("token", [None, "", "secre", "secret ", "Secret", "secretsecret"])
def test_membership_changes_require_the_token(engine: FakeEngine, path: str, token: str | None) -> None:
    server = Server(engine)
    answer = server.ask("POST", path, {"endpoint": "h:1"}, token)
    assert answer.status_code == 401 and "x-cluster-token" in answer.json()["error"]["message"]
    assert not server.cluster.joined and not server.cluster.drained


@pytest.mark.parametrize("path", ["/cluster/join", "/cluster/drain"])
def test_a_server_without_a_token_accepts_no_workers(engine: FakeEngine, path: str) -> None:
    server = Server(engine, token=None)
    for token in (None, "", "None"):
        answer = server.ask("POST", path, {"endpoint": "h:1"}, token)
        assert answer.status_code == 501 and "--cluster-token" in answer.json()["error"]["message"]
    assert not server.cluster.joined and not server.cluster.drained


@pytest.mark.parametrize(("body", "endpoint"), [
    ({"port": 50052}, "10.0.0.9:50052"), ({"port": 1, "tls": True}, "tls://10.0.0.9:1"), ({"endpoint": "x"}, "x"),
])  # fmt: skip
def test_a_worker_without_an_endpoint_has_the_address_of_its_client(
    engine: FakeEngine, body: dict[str, Any], endpoint: str
) -> None:
    server = Server(engine)
    assert server.ask("POST", "/cluster/join", body).json()["endpoint"] == endpoint
    assert server.cluster.joined[0][0] == endpoint


@pytest.mark.parametrize("body", [
    {}, {"endpoint": 1}, {"endpoint": ""}, {"port": 0}, {"port": 65536}, {"port": True}, {"port": "1"},
    {"port": 1, "tls": 1}, {"port": 1, "share": -1}, {"port": 1, "share": "1"}, {"port": 1, "share": True},
    {"port": 1, "devices": {}}, {"port": 1, "devices": [1]}, {"port": 1, "devices": [{}] * 257},
    {"endpoint": "h" * 100_000}, {"endpoint": "h\n:1"}, {"port": 1, "share": 1e300},
])  # fmt: skip
def test_invalid_joins_are_rejected(engine: FakeEngine, body: dict[str, Any]) -> None:
    server = Server(engine)
    assert server.ask("POST", "/cluster/join", body).status_code == 400
    assert not server.cluster.joined


def test_impossible_speeds_are_unknown(engine: FakeEngine) -> None:
    server = Server(engine)
    speeds = [1e9, 0, -1, 1e-300, 1e300, "1e9", None, True]
    assert server.ask("POST", "/cluster/join", {"port": 1, "devices": [{"decode": s} for s in speeds]}).is_success
    assert server.cluster.joined == [("10.0.0.9:1", 1.0, [1e9, *[None] * 7])]


def test_hanging_joins_block_no_other_request(engine: FakeEngine) -> None:
    server, frozen = Server(engine), threading.Event()

    def join(endpoint: str, share: float = 1.0, speeds: Sequence[float | None] = ()) -> list[JoinedWorker]:
        assert frozen.wait(GUARD)
        return []

    server.cluster.join = join  # type: ignore[method-assign]
    answers: list[httpx.Response] = []

    async def asking() -> None:
        transport = httpx.ASGITransport(app=create_app(server.state))
        headers = {"X-Cluster-Token": "secret"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:

            async def ask(path: str, endpoint: str) -> httpx.Response:
                return await client.post(path, json={"endpoint": endpoint})

            joins = [asyncio.ensure_future(ask("/cluster/join", f"h:{n}")) for n in range(1, 61)]
            refused, under_way = [], set(joins)
            while len(under_way) > 8:
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                refused += done
            answers.extend(one.result() for one in refused)
            answers.append(await ask("/cluster/drain", "h:99"))
            frozen.set()
            answers.extend(await asyncio.gather(*under_way))

    run(asking())
    assert [answer.status_code for answer in answers] == [503] * 52 + [200] * 9
    assert server.cluster.drained == ["h:99"]


def test_failed_membership_changes_are_reported(engine: FakeEngine) -> None:
    server = Server(engine)
    server.cluster.error = LlamadoError("no memory")
    answer = server.ask("POST", "/cluster/join", {"endpoint": "h:1"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no memory")
    server.cluster.error = UnknownWorker("h:1 is no worker of this server")
    assert server.ask("POST", "/cluster/drain", {"endpoint": "h:1"}).status_code == 404


LAYOUT = {"devices": [{"device": "CPU", "layers": [0], "head": True}, {"device": "RPC0[h:1]", "layers": [1, 2]}]}


def test_layers_are_moved(engine: FakeEngine) -> None:
    server = Server(engine, keys=(b"a key",))
    assert server.ask("POST", "/cluster/layers", LAYOUT).status_code == 401, "the token does not replace the API key"
    server = Server(engine)
    answer = server.ask("POST", "/cluster/layers", LAYOUT)
    assert answer.status_code == 200 and answer.json() == server.ask("GET", "/cluster").json()
    assert server.cluster.laid_out == [[LayoutPart("CPU", (0,), True), LayoutPart("RPC0[h:1]", (1, 2), False)]]


@pytest.mark.parametrize("path", ["/cluster/layers", "/cluster/predict"])
@pytest.mark.parametrize(
    ("cluster_token", "token", "client", "forwarded", "status"),
    [
        ("secret", "secret", "10.0.0.9", None, 200),
        ("secret", "wrong", "10.0.0.9", None, 403),
        ("secret", None, "10.0.0.9", None, 403),
        ("secret", None, "127.0.0.1", None, 200),
        ("secret", None, "::1", "127.0.0.1", 200),  # through a router
        ("secret", None, "127.0.0.1", "127.0.0.1, 10.0.0.9", 403),
        (None, None, "127.0.0.1", None, 200),
        (None, None, "10.0.0.9", None, 403),
        (None, "", "10.0.0.9", None, 403),
        (None, None, "127.0.0.1", "10.0.0.9", 403),
    ],
)
def test_layers_are_moved_from_this_machine_or_with_the_token(
    engine: FakeEngine, path: str, cluster_token: str | None, token: str | None, client: str, forwarded: str | None,
    status: int,
) -> None:  # fmt: skip
    server = Server(engine, cluster_token)
    headers = {} if forwarded is None else {"X-Forwarded-For": forwarded}
    assert server.ask("POST", path, LAYOUT, token, client, headers).status_code == status
    assert bool(server.cluster.laid_out) == (status == 200 and path == "/cluster/layers")


def test_a_layout_is_predicted(engine: FakeEngine) -> None:
    body = Server(engine).ask("POST", "/cluster/predict", LAYOUT).json()
    memory = {"weights": 1, "kv": 2, "compute": 3, "free": 4, "missing": 5}
    assert body == {
        "seconds": None,
        "devices": [{"device": "CPU", "memory": memory, "seconds": {"compute": 0.25, "link": 0.0}}],
    }


@pytest.mark.parametrize("path", ["/cluster/layers", "/cluster/predict"])
@pytest.mark.parametrize(
    "devices",
    [None, {}, [1], [{"layers": [0]}], [{"device": 1}], [{"device": "CPU", "layers": [True]}],
     [{"device": "CPU", "layers": "0"}], [{"device": "CPU", "head": 1}], [{"device": "CPU"}] * 257],
)  # fmt: skip
def test_invalid_layouts_are_rejected(engine: FakeEngine, path: str, devices: Any) -> None:
    server = Server(engine)
    assert server.ask("POST", path, {"devices": devices}).status_code == 400
    assert not server.cluster.laid_out


@pytest.mark.parametrize(
    ("error", "status"),
    [(BadLayout("layer 1 is named twice"), 400), (NotEnoughMemory("too little", {}), 400), (LlamadoError("gone"), 503)],
)
def test_impossible_layouts_are_reported(engine: FakeEngine, error: LlamadoError, status: int) -> None:
    server = Server(engine)
    server.cluster.error = error
    answer = server.ask("POST", "/cluster/layers", LAYOUT)
    assert answer.status_code == status and str(error) in answer.json()["error"]["message"]


def test_a_model_that_is_not_split_has_no_layout(engine: FakeEngine) -> None:
    server = Server(engine)
    server.state.served = served(engine)
    for path in ("/cluster/layers", "/cluster/predict"):
        assert server.ask("POST", path, LAYOUT).status_code == 501
