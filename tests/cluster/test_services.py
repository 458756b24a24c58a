"""Services of a cluster: their commands, environments and order."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import trustme

from llamado.cluster.file import ClusterFileError, parse_cluster
from llamado.cluster.services import CLUSTER_TOKEN, ProgramMissing, Service, ServiceRole, local_services
from llamado.commands.up.start import server_options
from llamado.flags import FlagError
from llamado.installation import own_command

MODEL = Path("/models/m.gguf")


def build(**given: Any) -> list[Service]:
    return local_services(parse_cluster({"port": 0, **given}, "x"), MODEL)


def value(service: Service, flag: str) -> str:
    return service.command[len(service.command) - service.command[::-1].index(flag)]


def test_nodes_on_one_machine() -> None:
    first, second, server = build(workers=2, model="tiny.gguf", server={"ctx-size": 64, "metrics": True, "mmap": False})
    assert [s.name for s in (first, second, server)] == ["worker1", "worker2", "server"]
    assert first.command[: len(own_command("worker"))] == tuple(own_command("worker"))
    assert value(first, "-p") == str(first.port) and len({s.port for s in (first, second, server)}) == 3
    assert value(server, "-m") == str(MODEL) and value(server, "--alias") == "tiny"
    assert value(server, "--rpc") == f"{first.address},{second.address}" and value(server, "--tensor-split") == "1,1,1"
    assert value(server, "--threads") == value(first, "-t")
    assert server.command[-4:] == ("--ctx-size", "64", "--metrics", "--no-mmap")
    assert server.needs == ("worker1", "worker2") and not server.restarts_with_needs


def test_a_server_without_workers_uses_all_cores() -> None:
    (server,) = build(model="smollm2", host="0.0.0.0")
    assert "--rpc" not in server.command and "--threads" not in server.command
    assert server.url == f"http://127.0.0.1:{server.port}" and value(server, "--alias") == "smollm2"


def test_a_server_connects_through_taps() -> None:
    links = [{"link": {"latency": 20, "jitter": 2, "bandwidth": "1G", "all": True}}]
    links.append({"threads": 3, "mem": 64, "models_dir": "/models"})
    first, second, tap, server = build(workers=links)
    assert (tap.name, tap.needs, value(tap, "--target-port")) == ("tap1", ("worker1",), str(first.port))
    assert tap.command[-7:] == ("--latency-ms", "20", "--jitter-ms", "2", "--bandwidth", "1G", "--all")
    assert value(server, "--rpc") == f"{tap.address},{second.address}"
    assert "--tensor-split" not in server.command  # the workers differ
    assert (value(second, "-t"), value(second, "-m")) == ("3", "64")
    assert value(second, "--models-dir") == "/models" and "--models-dir" not in first.command


def test_workers_on_other_machines_are_not_started() -> None:
    remote, server = build(workers=[{"host": "10.0.0.7", "port": 50052}])
    assert remote.command == () and value(server, "--rpc") == "10.0.0.7:50052" and server.needs == ("worker1",)


def test_programs_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / "llamado").touch(0o755)
    for name in ("llama-server", "rpc-server"):
        (links / name).symlink_to("llamado")  # our own program under their names does not count
    monkeypatch.setenv("PATH", f"{links}:{tmp_path}")
    with pytest.raises(ProgramMissing, match="no llama-server in PATH"):
        build(engine="llama.cpp", workers=1)
    for name in ("llama-server", "rpc-server"):
        (tmp_path / name).write_text("")
        os.chmod(tmp_path / name, 0o755)
    server: dict[str, Any] = {"ctx-size": 64, "docker-repo": "x"}  # only llama-server checks its flags
    worker, llama_server = build(engine="llama.cpp", workers=1, server=server)
    assert worker.command[0] == str(tmp_path / "rpc-server") and llama_server.command[0] == str(
        tmp_path / "llama-server"
    )
    ours = build(workers=1, server={"ctx-size": 64})
    flags = [[word for word in s.command if word.startswith("-")] for s in (worker, llama_server)]
    assert flags[0] == [word for word in ours[0].command[len(own_command("worker")) :] if word.startswith("-")]
    assert flags[1][:-1] == [word for word in ours[1].command[len(own_command("serve")) :] if word.startswith("-")]
    assert llama_server.restarts_with_needs  # llama-server cannot continue without a worker
    with pytest.raises(ClusterFileError, match=r"workers\[1\]\.mem"):
        build(engine="llama.cpp", workers=[{"mem": 5}])
    with pytest.raises(FlagError, match="docker-repo"):
        build(server=server)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"ctx-sise": 1}, r"server\.ctx-sise: unknown flag; did you mean ctx-size\?"),
        ({"ctx-size": "many"}, "ctx-size.*a whole number"),
        ({"metrics": "yes"}, r"server\.metrics: expected true or false"),
    ],
)
def test_the_servers_flags_are_checked(server: dict[str, Any], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        build(server=server)


def test_flags_of_the_server_after_the_dashes() -> None:
    given = ["-c", "64", "--metrics", "--no-mmap", "--lora", "a", "--lora", "b", "-fa", "--temp=0.5", "-np", "2"]
    assert server_options(given) == {
        "ctx-size": "64",
        "metrics": True,
        "mmap": False,
        "lora": ["a", "b"],
        "flash-attn": "on",
        "temp": "0.5",
        "parallel": "2",
    }
    for bad in (["nonsense"], ["--nonsense"], ["-c"]):
        with pytest.raises(FlagError):
            server_options(bad)


def test_replicas_have_their_own_workers_and_a_gateway() -> None:
    services = build(replicas=2, workers=[{"link": {"latency": 5}}], gateway={"patience": 20})
    assert [s.name for s in services] == [
        *("worker1.1", "worker2.1", "tap1.1", "tap2.1", "server1", "server2", "gateway")
    ]
    by_name = {s.name: s for s in services}
    for number in "12":
        server = by_name[f"server{number}"]
        assert value(server, "--rpc") == by_name[f"tap{number}.1"].address
        assert server.needs == (f"worker{number}.1", f"tap{number}.1")
    gateway = by_name["gateway"]
    replicas = [word for n, word in enumerate(gateway.command) if gateway.command[n - 1] == "--replica"]
    assert replicas == [by_name["server1"].url, by_name["server2"].url]
    assert value(gateway, "--patience") == "20" and gateway.needs_once
    assert gateway.needs == ("server1", "server2") and len(gateway.environment["LLAMADO_ADMIN_KEY"]) == 32
    assert len({s.port for s in services}) == len(services)
    assert [s.name for s in build(gateway={"patience": 20})] == ["server", "gateway"]
    for bad, message in (
        ({"workers": [{"port": 5}], "replicas": 2}, "leave the port out"),
        ({"gateway": {"patiense": 1}}, "gateway.patiense: unknown flag; did you mean patience"),
        ({"gateway": {"port": 1}}, "gateway.port: set by other keys"),
    ):
        with pytest.raises((ClusterFileError, FlagError), match=message):
            build(**bad)


def test_certificates_and_api_prefix(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = tmp_path / "cert.pem"
    authority.issue_cert("elsewhere.example").cert_chain_pems[0].write_to_path(str(certificate))
    tls = {"ssl-cert-file": str(certificate), "ssl-key-file": "key.pem"}
    (server,) = build(server={**tls, "api-prefix": "/llm/"})
    assert server.url == f"https://127.0.0.1:{server.port}/llm" and server.command[-2:] == ("--api-prefix", "/llm/")
    _, replica, gateway = build(replicas=2, server={"api-prefix": "/llm"}, gateway=tls)
    assert gateway.url == f"https://127.0.0.1:{gateway.port}" and replica.url.endswith("/llm")
    assert replica.url in gateway.command and replica.url.startswith("http://")
    assert "--ssl-cert-file" in gateway.command
    for path in (tmp_path / "none.pem", Path(__file__)):
        for key in ("server", "gateway"):
            with pytest.raises(ClusterFileError, match=f"ssl-cert-file: {path}: not a PEM certificate"):
                build(**{key: {"ssl-cert-file": str(path)}})


def test_servers_have_a_cluster_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_TOKEN, raising=False)
    tokens = [s.environment[CLUSTER_TOKEN] for s in build(workers=1, replicas=2) if s.role is ServiceRole.SERVER]
    assert len(set(tokens)) == 2 and all(len(token) == 32 for token in tokens)
    assert build(workers=1, server={"cluster-token": "mine"})[-1].environment == {CLUSTER_TOKEN: "mine"}
    monkeypatch.setenv(CLUSTER_TOKEN, "of the terminal")
    assert build(workers=1)[-1].environment == {CLUSTER_TOKEN: "of the terminal"}
    assert build()[-1].environment == {CLUSTER_TOKEN: "of the terminal"}


def test_secrets_are_passed_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMADO_REPLICA_KEY", "secret-4")
    services = build(
        workers=1,
        replicas=2,
        server={
            "api-key": ["secret-1", "secret-2"],
            "hf-token": "secret-3",
            "cluster-token": "secret-5",
            "metrics": True,
        },
        gateway={"api-key": "secret-6", "admin-key": "secret-7"},
    )
    for service in services:
        assert "secret" not in repr(service)
    server, gateway = services[-2:]
    assert server.command[-1] == "--metrics"
    assert server.environment["LLAMA_API_KEY"] == "secret-1,secret-2"
    assert (server.environment["HF_TOKEN"], server.environment[CLUSTER_TOKEN]) == ("secret-3", "secret-5")
    assert gateway.environment["LLAMA_API_KEY"] == "secret-6"
    assert (gateway.environment["LLAMADO_ADMIN_KEY"], gateway.environment["LLAMADO_REPLICA_KEY"]) == (
        "secret-7",
        "secret-4",
    )
    assert not [service for service in services if service.role is ServiceRole.WORKER and service.environment]


def test_without_worker_removes_its_address_and_share() -> None:
    services = build(workers=3, server={"ctx-size": 64})
    workers, server = services[:3], services[3]
    left = server.without_worker(workers[1].address, ["worker2"])
    assert (
        value(left, "--rpc") == f"{workers[0].address},{workers[2].address}"
        and value(left, "--tensor-split") == "1,1,1"
    )
    assert left.needs == ("worker1", "worker3") and left.command[-2:] == ("--ctx-size", "64")
    shares = build(workers=2, server={"tensor-split": "5/3/1"})
    assert value(shares[2].without_worker(shares[0].address, ["worker1"]), "--tensor-split") == "3,1"
    auto = build(workers=2, server={"tensor-split": "auto"})
    assert value(auto[2].without_worker(auto[0].address, ["worker1"]), "--tensor-split") == "auto"


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ClusterFileError, match=f"127.0.0.1:{port}: .*in use; choose another port"):
            build(port=port)
        with pytest.raises(ClusterFileError, match=f"127.0.0.1:{port}"):
            build(workers=[{"port": port}])
    with pytest.raises(ClusterFileError, match=f"127.0.0.1:{port}"):
        build(workers=[{"port": port}, {"port": port}])
