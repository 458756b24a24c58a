"""What runs on Ray: which services, and the actor that holds a process (Ray itself is in tests/on_ray)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from waiting import GUARD

from llamado.cluster.file import ClusterFileError, cluster_of
from llamado.cluster.ray import actor
from llamado.cluster.ray.actor import GONE, ProcessActor
from llamado.cluster.ray.nodes import RayUnavailable, connected
from llamado.cluster.ray.services import services_on_ray
from llamado.cluster.services import Addresses, Reservation, Service
from llamado.flags import FlagError


def made(**given: Any) -> list[Service]:
    return services_on_ray(cluster_of({"on": "ray", "port": 0, **given}, "x"))


def test_servers_and_workers_reserve_what_they_use() -> None:
    usual = {"server": {"cpus": 4, "memory": "8G"}, "worker": {"cpus": 2, "memory": 512, "node": "10.0.0.9"}}
    first, second, server, gateway = made(workers=[{}, {"threads": 3, "mem": "1G", "node": "n"}], ray=usual)
    assert first.command == ("worker", "-t", "2", "-m", "512")
    assert first.reserves == Reservation(2, 512 << 20, "10.0.0.9")
    assert second.command == ("worker", "-t", "3", "-m", "1G") and second.reserves == Reservation(3, 1 << 30, "n")
    assert server.reserves == Reservation(4, 8 << 30) and server.needs == ("worker1", "worker2")
    assert Addresses("--rpc", ("worker1", "worker2")) in server.command and server.goes_without
    told = dict(zip(server.command[4::2], server.command[5::2], strict=True))
    assert told == {"--rpc-failover": "2", "--threads": "4", "--alias": "smollm2"}
    assert len(server.environment["LLAMADO_CLUSTER_TOKEN"]) == 32
    assert (
        gateway.reserves is None and gateway.port and Addresses("--replica", ("server",), "http://") in gateway.command
    )
    assert not first.address and not server.address


def test_each_replica_has_its_own_workers() -> None:
    services = made(replicas=2, workers=1, server={"tensor-split": "1,1", "threads": 7, "rpc-failover": 9})
    assert [s.name for s in services] == ["worker1.1", "worker2.1", "server1", "server2", "gateway"]
    assert services[2].needs == ("worker1.1",) and services[2].command.count("--threads") == 1
    assert not services[2].goes_without, "proportions are told for all workers"
    tokens = {s.environment.get("LLAMADO_CLUSTER_TOKEN") for s in services[2:4]}
    assert len(tokens) == 1


def test_a_server_goes_on_without_a_worker_that_was_drained() -> None:
    *_, server, _ = made(workers=2, server={"tensor-split": "3,1,2"})
    left = server.without("10.0.0.2:5", ["worker2"])
    assert Addresses("--rpc", ("worker1",)) in left.command and left.needs == ("worker1",)
    assert left.command[left.command.index("--tensor-split") + 1] == "3,2"
    alone = left.without("10.0.0.1:5", ["worker1"])
    assert not any(isinstance(word, Addresses) for word in alone.command) and "--tensor-split" not in alone.command


def test_paths_may_have_a_prefix() -> None:
    server, gateway = made(server={"api-prefix": "/x/"})
    assert server.prefix == "/x"
    (replicas,) = [word for word in gateway.command if isinstance(word, Addresses)]
    assert replicas.words(["a:1", "b:2"]) == ["--replica", "http://a:1/x,http://b:2/x"] and replicas.words([]) == []


def test_a_model_here_is_told_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert made(model="m.gguf")[0].command[2] == str(tmp_path / "m.gguf")
    assert made(model="gemma3")[0].command[2] == "gemma3"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine": "llama.cpp"}, "engine: on Ray llamado's own programs run"),
        ({"workers": [{"link": {"latency": 1}}]}, r"workers\[1\].link: slow links"),
        ({"workers": [{"port": 1}]}, r"workers\[1\].port: a free one is taken"),
        ({"workers": [{"host": "10.0.0.7", "port": 1, "node": "n"}]}, r"workers\[1\].node"),
        ({"ray": {"worker": {"memory": "much"}}, "workers": 1}, "worker1: memory: expected MiB"),
    ],
)
def test_what_does_not_go_with_ray(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ClusterFileError, FlagError), match=said):
        made(**given)


def test_on_is_a_key_as_it_is_written() -> None:
    """YAML 1.1 reads it as true."""
    assert cluster_of({True: "ray"}, "x").on == "ray"


@pytest.mark.parametrize("folder", [False, True])
def test_ray_that_is_not_installed(folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = cluster_of({"on": "ray"}, "x").ray
    if folder:
        (tmp_path / "ray").mkdir()  # as Ray leaves one in /tmp
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if not (Path(path) / "ray").exists())])
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RayUnavailable, match=r"Ray is not installed: .*pip install .*ray"), connected(config, "n", 1.0):
        pass


# --- the actor --------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), sys.exit(7)))
print(*sys.argv[1:], *([os.environ["KEY"]] if "KEY" in os.environ else []), flush=True)
time.sleep(600)
"""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> ProcessActor:
    monkeypatch.setattr(actor, "own_command", lambda *words: [sys.executable, "-S", "-c", PROGRAM, *words])
    return ProcessActor(5.0, "127.0.0.1")


def lines_of(process: ProcessActor, run: int, n: int) -> tuple[list[str], int | None]:
    found, code = list[str](), None
    while len(found) < n and code is None:
        lines, code = process.follow(run, len(found), 1.0)
        found += lines
    return found, code


def test_an_actor_starts_follows_and_ends_a_process(process: ProcessActor) -> None:
    begun = process.start(["serve", "-m", "x"], {"KEY": "v"})
    assert begun.host == "127.0.0.1" and begun.port > 0
    assert lines_of(process, begun.run, 1) == ([f"serve -m x --host 127.0.0.1 --port {begun.port} v"], None)
    threading.Timer(0.1, process.signal, (begun.run, signal.SIGTERM)).start()
    lines, code = process.follow(begun.run, 1, GUARD)  # woken by it
    while code is None:
        more, code = process.follow(begun.run, 1 + len(lines), GUARD)
        lines += more
    assert (lines, code) == (["asked to end"], 7)


def test_an_actor_has_one_process(process: ProcessActor) -> None:
    first = process.start(["a"], {})
    second = process.start(["b"], {})  # who has lost the first starts again
    assert process.follow(first.run, 0, GUARD) == ([], GONE)
    with pytest.raises(ProcessLookupError):
        os.kill(first.pid, 0)
    process.signal(first.run, signal.SIGKILL)  # means nobody any more
    assert lines_of(process, second.run, 1)[0] == [f"b --host 127.0.0.1 --port {second.port}"]
    process.signal(second.run, signal.SIGKILL)
    assert lines_of(process, second.run, 99)[1] == GONE
