"""`llamado deploy TARGET cluster.yaml`: the files run the same cluster as `llamado up`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from llamado.cluster.deploy.deployment import Deployment, DeploymentError
from llamado.cluster.deploy.from_file import deployment_of
from llamado.cluster.deploy.targets import TARGETS, files_for
from llamado.cluster.file import parse_cluster
from llamado.commands import cli

KEYS: dict[str, Any] = {
    "name": "mine",
    "model": "smollm2",
    "port": 9000,
    "replicas": 2,
    "workers": [{"threads": 3, "mem": "2G"}, {"threads": 3, "mem": "2G"}],
    "server": {"ctx-size": 4096, "mmap": False},
    "gateway": {"patience": 20},
}


def test_a_file_sets_the_deployment() -> None:
    found = deployment_of(parse_cluster(KEYS, "x"), "x", "kubernetes")
    assert found == Deployment(
        name="mine",
        serve=("--model", "smollm2", "--alias", "smollm2", "--ctx-size", "4096", "--no-mmap"),
        port=9000,
        replicas=2,
        workers=2,
        worker=("--threads", "3", "--mem", "2G"),
        gateway=("--patience", "20"),
    )
    assert deployment_of(parse_cluster({}, "x"), "x", "systemd").gateway is None
    assert deployment_of(parse_cluster({"replicas": 2}, "x"), "x", "systemd").gateway == ()


def test_a_model_file_has_the_path_of_the_target(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    config = parse_cluster({"model": str(path)}, "x")
    inside, outside = (deployment_of(config, "x", target) for target in ("compose", "systemd"))
    assert inside.serve[:2] == ("--model", "/models/m.gguf") and inside.models == str(tmp_path)
    assert outside.serve[:2] == ("--model", str(path)) and outside.models == Deployment().models
    assert outside.serve[2:] == ("--alias", "m")


@pytest.mark.parametrize(("target", "folder"), [("compose", "/models"), ("systemd", "/data")])
def test_models_dir_of_workers(target: str, folder: str) -> None:
    config = parse_cluster({"workers": [{"models_dir": "/data"}]}, "x")
    assert deployment_of(config, "x", target).worker == ("--models-dir", folder)


def test_workers_on_other_machines_are_passed_by_address() -> None:
    config = parse_cluster({"workers": [{"host": "10.0.0.7", "port": 1}, {"host": "10.0.0.8", "port": 2}]}, "x")
    found = deployment_of(config, "x", "compose")
    assert found.workers == 0 and found.serve[-2:] == ("--rpc", "10.0.0.7:1,10.0.0.8:2")


def test_keys_and_certificates_of_the_file() -> None:
    gateway = {"ssl-key-file": "/k.pem", "ssl-cert-file": "/c.pem", "api-key": "sk-clients"}
    found = deployment_of(parse_cluster({"server": {"api-key": "sk-own"}, "gateway": gateway}, "x"), "x", "compose")
    assert found.https and found.has_key and not found.server_https
    assert found.secrets("server") == {"LLAMA_API_KEY": "sk-own"}
    assert found.secrets("gateway") == {"LLAMA_API_KEY": "sk-clients", "LLAMADO_REPLICA_KEY": "sk-own"}
    assert found.source("ssl_cert_file") == "/c.pem"


@pytest.mark.parametrize("target", TARGETS)
def test_flags_take_precedence_over_the_file(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(KEYS))
    assert cli.main(["deploy", target, str(file), "--memory", "8G", "--workers", "3", "--", "-c", "64"]) == 0
    printed = capsys.readouterr().out
    config = parse_cluster({**KEYS, "server": {"ctx-size": "64", "mmap": False}}, "x")
    expected = files_for(target, deployment_of(config, "x", target, memory="8G", workers=3))
    assert all(text in printed for text in expected.values())
    assert target in ("grafana", "prometheus", "nginx", "docker") or "gateway" in printed


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine": "llama.cpp"}, "engine: only llamado's own programs"),
        ({"workers": [{"link": {"latency": 5}}]}, r"workers\[1\].link: slow links are for experiments"),
        ({"workers": [{"threads": 1}, {}]}, "deployed workers must be equal"),
        ({"workers": [{}, {"host": "10.0.0.7", "port": 1}]}, "use existing workers or deploy new ones, not both"),
    ],
)
def test_unsupported_files_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(DeploymentError, match=message):
        deployment_of(parse_cluster(keys, "c.yaml"), "c.yaml", "compose")
