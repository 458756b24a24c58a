"""Ray: services of a cluster, and the actor that runs a process (tests/on_ray uses Ray itself)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from waiting import GUARD

from llamado.cluster.file import ClusterFileError, parse_cluster
from llamado.cluster.ray import actor
from llamado.cluster.ray.actor import LOST, ProcessActor
from llamado.cluster.ray.nodes import RayUnavailable, connect
from llamado.cluster.ray.services import ray_services
from llamado.cluster.services import AddressFlag, Reservation, Service
from llamado.flags import FlagError


def made(**given: Any) -> list[Service]:
    return ray_services(parse_cluster({"on": "ray", "port": 0, **given}, "x"))


def test_servers_and_workers_reserve_what_they_use() -> None:
    usual = {"server": {"cpus": 4, "memory": "8G"}, "worker": {"cpus": 2, "memory": 512, "node": "10.0.0.9"}}
    first, second, server, gateway = made(workers=[{}, {"threads": 3, "mem": "1G", "node": "n"}], ray=usual)
    assert first.command == ("worker", "-t", "2", "-m", "512")
    assert first.reservation == Reservation(2, 512 << 20, "10.0.0.9")
    assert second.command == ("worker", "-t", "3", "-m", "1G") and second.reservation == Reservation(3, 1 << 30, "n")
    assert server.reservation == Reservation(4, 8 << 30) and server.needs == ("worker1", "worker2")
    assert AddressFlag("--rpc", ("worker1", "worker2")) in server.command and server.needs_once
    flags = dict(zip(server.command[4::2], server.command[5::2], strict=True))
    assert flags == {"--rpc-failover": "2", "--threads": "4", "--alias": "smollm2"}
    assert len(server.environment["LLAMADO_CLUSTER_TOKEN"]) == 32
    assert (
        gateway.reservation is None
        and gateway.port
        and AddressFlag("--replica", ("server",), "http://") in gateway.command
    )
    assert not first.address and not server.address


def test_each_replica_has_its_own_workers() -> None:
    services = made(replicas=2, workers=1, server={"tensor-split": "1,1", "threads": 7, "rpc-failover": 9})
    assert [s.name for s in services] == ["worker1.1", "worker2.1", "server1", "server2", "gateway"]
    assert services[2].needs == ("worker1.1",) and services[2].command.count("--threads") == 1
    assert not services[2].needs_once, "explicit shares need all workers"
    tokens = {s.environment.get("LLAMADO_CLUSTER_TOKEN") for s in services[2:4]}
    assert len(tokens) == 1


def test_a_drained_worker_is_removed_from_the_servers_command() -> None:
    *_, server, _ = made(workers=2, server={"tensor-split": "3,1,2"})
    left = server.without_worker("10.0.0.2:5", ["worker2"])
    assert AddressFlag("--rpc", ("worker1",)) in left.command and left.needs == ("worker1",)
    assert left.command[left.command.index("--tensor-split") + 1] == "3,2"
    alone = left.without_worker("10.0.0.1:5", ["worker1"])
    assert not any(isinstance(word, AddressFlag) for word in alone.command) and "--tensor-split" not in alone.command


def test_replica_addresses_have_the_api_prefix() -> None:
    server, gateway = made(server={"api-prefix": "/x/"})
    assert server.prefix == "/x"
    (replicas,) = [word for word in gateway.command if isinstance(word, AddressFlag)]
    assert (
        replicas.arguments(["a:1", "b:2"]) == ["--replica", "http://a:1/x,http://b:2/x"]
        and replicas.arguments([]) == []
    )


def test_a_model_file_is_passed_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert made(model="m.gguf")[0].command[2] == str(tmp_path / "m.gguf")
    assert made(model="gemma3")[0].command[2] == "gemma3"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "llama.cpp"}, "engine: Ray runs llamado's own programs"),
        ({"workers": [{"link": {"latency": 1}}]}, r"workers\[1\].link: slow links"),
        ({"workers": [{"port": 1}]}, r"workers\[1\].port: Ray's node picks a free port"),
        ({"workers": [{"host": "10.0.0.7", "port": 1, "node": "n"}]}, r"workers\[1\].node"),
        ({"ray": {"worker": {"memory": "much"}}, "workers": 1}, "worker1: memory: expected"),
    ],
)
def test_settings_without_support_on_ray_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ClusterFileError, FlagError), match=message):
        made(**given)


def test_the_key_on_is_read() -> None:
    """YAML 1.1 turns it into true."""
    assert parse_cluster({True: "ray"}, "x").on == "ray"


@pytest.mark.parametrize("folder", [False, True])
def test_missing_ray_is_reported(folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_cluster({"on": "ray"}, "x").ray
    if folder:
        (tmp_path / "ray").mkdir()  # as Ray leaves one in /tmp
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if not (Path(path) / "ray").exists())])
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RayUnavailable, match=r"Ray is not installed: .*pip install .*ray"), connect(config, "n", 1.0):
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
        lines, code = process.read_output(run, len(found), 1.0)
        found += lines
    return found, code


def test_an_actor_starts_reads_and_ends_a_process(process: ProcessActor) -> None:
    info = process.start(["serve", "-m", "x"], {"KEY": "v"})
    assert info.host == "127.0.0.1" and info.port > 0
    assert lines_of(process, info.run, 1) == ([f"serve -m x --host 127.0.0.1 --port {info.port} v"], None)
    threading.Timer(0.1, process.signal, (info.run, signal.SIGTERM)).start()
    lines, code = process.read_output(info.run, 1, GUARD)  # woken by it
    while code is None:
        more, code = process.read_output(info.run, 1 + len(lines), GUARD)
        lines += more
    assert (lines, code) == (["asked to end"], 7)


def test_an_actor_has_one_process(process: ProcessActor) -> None:
    first = process.start(["a"], {})
    second = process.start(["b"], {})  # as after the supervisor has lost the first
    assert process.read_output(first.run, 0, GUARD) == ([], LOST)
    with pytest.raises(ProcessLookupError):
        os.kill(first.pid, 0)
    process.signal(first.run, signal.SIGKILL)  # ignored: another run has started
    assert lines_of(process, second.run, 1)[0] == [f"b --host 127.0.0.1 --port {second.port}"]
    process.signal(second.run, signal.SIGKILL)
    assert lines_of(process, second.run, 99)[1] == LOST
