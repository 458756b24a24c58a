"""`llamado up --on ray` on three Ray nodes on this machine: actors and nodes end during streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tiny_models import make_llama
from waiting import GUARD, until

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip(
    "ray", reason="Ray is not installed here: tests/on_ray/run.sh installs it and runs these tests"
)
pytestmark = pytest.mark.slow

REQUEST = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "return_tokens": True, "seed": 1}
LENGTH = 1500


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Run three nodes with two CPUs each."""
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 2, "object_store_memory": 80 << 20}
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    cluster = Cluster(
        initialize_head=True, head_node_args={**common, "include_dashboard": False, "_system_config": quick}
    )
    try:
        for _ in range(2):
            cluster.add_node(**common)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    return make_llama(path, n_embd=256, n_ff=512, n_layer=4, n_ctx=4096, wtype="Q4_0")


class Up:
    """`llamado up` of a file, and related commands."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.folder = folder
        (folder / "run").mkdir()
        (folder / "cluster.yaml").write_text(yaml.safe_dump({"port": 0, **keys}))
        self.environment = os.environ | {"XDG_RUNTIME_DIR": str(folder / "run")}
        command = [sys.executable, "-m", "llamado", "up", str(folder / "cluster.yaml"), "--on", "ray"]
        with (folder / "out").open("wb") as out:
            self.process = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)

    def output(self) -> str:
        return (self.folder / "out").read_text()

    def command(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llamado", *arguments], env=self.environment, capture_output=True, text=True,
            timeout=GUARD, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def state(self) -> dict[str, Any]:
        path = self.folder / "run" / "llamado" / "default" / "state.json"
        found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        return found

    def service(self, name: str) -> dict[str, Any]:
        return next(one for one in self.state()["services"] if one["name"] == name)

    def ready(self) -> str:
        """Wait until all services are ready, and return the gateway's URL."""

        def is_ready() -> str | None:
            assert self.process.poll() is None, self.output()
            state = self.state()
            return str(state["url"]) if state.get("phase") == "ready" else None

        return str(until(is_ready))

    def restarted(self, name: str, pid: int) -> dict[str, Any]:
        """Wait until a service is ready as another process than `pid`, and return it."""
        return dict(
            until(lambda: (now := self.service(name))["pid"] not in (0, pid) and now["phase"] == "ready" and now)
        )

    def end(self, sig: int = signal.SIGINT) -> int:
        self.process.send_signal(sig)
        return self.process.wait(GUARD)


@pytest.fixture
def up(tmp_path: Path, model: Path, nodes: Any) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(**keys: Any) -> Up:
        keys["ray"] = {"address": nodes.address, **keys.get("ray", {})}
        keys["server"] = {"ctx-size": 4096, **keys.get("server", {})}
        started.append(Up(tmp_path, **{"model": str(model), **keys}))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.end()


class Stream(threading.Thread):
    """A streamed answer, read in a thread."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.tokens, self.has_begun = url, list[int](), threading.Event()
        self.start()

    def run(self) -> None:
        body = {**REQUEST, "n_predict": LENGTH, "stream": True}
        with httpx.stream("POST", f"{self.url}/completion", json=body, timeout=GUARD) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.tokens += json.loads(line[6:]).get("tokens") or []
                    if len(self.tokens) > 8:
                        self.has_begun.set()

    def whole(self) -> list[int]:
        self.join(GUARD)
        assert not self.is_alive()
        return self.tokens


def started_stream(url: str) -> Stream:
    stream = Stream(url)
    assert stream.has_begun.wait(GUARD)
    assert len(stream.tokens) < LENGTH
    return stream


def parent(pid: int) -> int:
    """Return the parent process: a service's actor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def node_of(actor_pid: int) -> str:
    """Return the id of an actor's node."""
    found = ray._private.state.actors().values()
    (one,) = [actor for actor in found if actor["Pid"] == actor_pid and actor["State"] == "ALIVE"]
    return str(one["Address"]["NodeID"])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_answers_continue_when_actors_and_nodes_end(up: Callable[..., Up], nodes: Any) -> None:
    cluster = up(workers=2, server={"tensor-split": "1,1,1"}, ray={"worker": {"memory": 200}})
    url = cluster.ready()
    held = httpx.get(f"http://{cluster.service('server')['address']}/cluster").json()["devices"]
    assert len(held) == 3 and all(device["holds"] for device in held), held
    expected = Stream(url).whole()
    assert len(expected) == LENGTH

    first = cluster.service("worker1")
    stream = started_stream(url)
    os.kill(parent(first["pid"]), signal.SIGKILL)  # the actor
    assert stream.whole() == expected
    again = cluster.restarted("worker1", first["pid"])
    assert again["address"] != first["address"] and again["restarts"] == 1
    until(lambda: not alive(first["pid"]))

    places = {name: node_of(parent(cluster.service(name)["pid"])) for name in ("server", "worker1", "worker2")}
    there = {node.node_id: node for node in nodes.list_all_nodes() if not node.head}
    name = next(name for name in ("worker1", "worker2") if places[name] in there and places[name] != places["server"])
    lost = cluster.service(name)
    stream = started_stream(url)
    nodes.remove_node(there[places[name]], allow_graceful=False)
    assert stream.whole() == expected
    cluster.restarted(name, lost["pid"])

    def whole_again() -> bool:
        """Return True if the server splits the model among exactly the current workers."""
        devices = httpx.get(f"http://{cluster.service('server')['address']}/cluster").json()["devices"]
        there = {cluster.service(name)["address"] for name in ("worker1", "worker2")}
        return {device["endpoint"] for device in devices} == {None, *there} and all(d["holds"] for d in devices)

    until(whole_again)
    assert Stream(url).whole() == expected
    assert "worker1" in cluster.command("ps") and "llamado worker on" in cluster.command("logs", "worker1")
    assert cluster.command("drain", "worker1") == "worker1 is drained\n"
    assert Stream(url).whole() == expected
    pids = [one["pid"] for one in cluster.state()["services"]]
    assert cluster.end() == 0, cluster.output()
    until(lambda: not any(alive(pid) for pid in pids))


def test_the_gateway_follows_replicas(up: Callable[..., Up]) -> None:
    cluster = up(replicas=2, gateway={"admin-key": "k"})
    url = cluster.ready()

    def replicas() -> dict[str, dict[str, Any]]:
        listed = httpx.get(f"{url}/gateway/replicas", headers={"Authorization": "Bearer k"}).json()["replicas"]
        return {one["name"]: one for one in listed}

    expected = Stream(url).whole()
    stream = started_stream(url)
    busy = until(lambda: [name for name, one in replicas().items() if one["in_flight"]])
    servers = {name: cluster.service(name) for name in ("server1", "server2")}
    idle = next(name for name, one in servers.items() if one["address"] not in busy)
    os.kill(parent(servers[idle]["pid"]), signal.SIGKILL)
    assert stream.whole() == expected and len(expected) == LENGTH
    now = cluster.restarted(idle, servers[idle]["pid"])
    other = next(one for name, one in servers.items() if name != idle)
    until(
        lambda: (
            {name for name, one in replicas().items() if one["state"] == "ready"} == {now["address"], other["address"]}
        )
    )
    assert len(replicas()) == 2
    os.kill(parent(other["pid"]), signal.SIGKILL)
    assert Stream(url).whole() == expected  # by the restarted replica
    pids = [one["pid"] for one in cluster.state()["services"]]
    cluster.process.kill()  # no process may survive this either
    cluster.process.wait(GUARD)
    until(lambda: not any(alive(pid) for pid in pids))
    assert "was killed" in cluster.command("down")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"workers": 1, "ray": {"wait": 1, "worker": {"cpus": 99}}}, "99 CPUs on one node are needed"),
        ({"workers": [{"node": "10.9.9.9"}]}, "Ray has no node 10.9.9.9; its nodes are "),
        ({"workers": 9, "ray": {"wait": 3}}, "Ray has not enough free resources: 1 CPUs on one node are needed"),
        ({"ray": {"address": "127.0.0.1:1"}}, "cannot reach Ray at 127.0.0.1:1"),
        ({"model": "nothing.gguf"}, "nothing.gguf"),
    ],
)
def test_missing_resources_are_reported(up: Callable[..., Up], keys: dict[str, Any], message: str) -> None:
    cluster = up(**keys)
    assert cluster.process.wait(GUARD) == 1
    assert message in cluster.output() and "Traceback" not in cluster.output(), cluster.output()
