"""Keys and tokens reach no other process, unless it needs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamado.cluster.file import parse_cluster
from llamado.cluster.ray.services import ray_services
from llamado.cluster.services import ServiceRole, local_services
from llamado.commands.up import start
from llamado.flags import FLAGS, SECRET_FLAGS, secrets_of, split_secrets
from llamado.processes import secret_values
from llamado.router import presets
from llamado.router.swap_config import read_swap_config

PROGRAM = """
import json, os, sys
from llamado.processes.secret_values import child_environment, declare, secret, taken
declare(["A_KEY"])
with taken(sys.argv, ["--key", "-k"]) as environ:
    linux = sys.platform == "linux"
    shown = {name: open(f"/proc/self/{name}").read() for name in ("environ", "cmdline") if linux}
    print(json.dumps([shown, dict(os.environ), child_environment(), environ["A_KEY"], secret("A_KEY")]))
print(os.environ["A_KEY"])
"""


def test_a_command_hides_its_secrets() -> None:
    environment = {"A_KEY": "secret-1", "OTHER": "plain", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = ["--key", "secret-2", "--key=secret-3", "-k", "secret-4", "--other", "word"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], env=environment, capture_output=True, check=True)
    line, after = done.stdout.decode().splitlines()
    *shown, given, kept = json.loads(line)
    if sys.platform == "linux":
        assert "secret-" not in json.dumps(shown[0])
        assert "OTHER=plain" in shown[0]["environ"] and "\0--other\0word\0" in shown[0]["cmdline"]
    for inherited in shown[1:]:
        assert "A_KEY" not in inherited and inherited["OTHER"] == "plain"
    assert given == kept == after == "secret-1"


def test_flags_with_keys_are_secrets() -> None:
    """Each secret reaches child processes through an environment variable; one flag has no children."""
    for flag in FLAGS:
        if flag.metavar in ("KEY", "TOKEN"):
            assert flag.secret and set(flag.names) <= SECRET_FLAGS, flag.names
        assert flag.env or not flag.secret or flag.commands == {"verify"}


def test_commands_are_given_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMADO_ADMIN_KEY", "admin")
    monkeypatch.setenv("LLAMADO_CLUSTER_TOKEN", "token")
    assert secrets_of("gateway")["LLAMADO_ADMIN_KEY"] == "admin" and "LLAMADO_ADMIN_KEY" not in secrets_of("serve")
    assert secrets_of("worker") == {"LLAMADO_CLUSTER_TOKEN": "token"}
    words = ["--ctx-size", "8", "--api-key", "a", "--metrics", "--api-key", "b", "--cluster-token", "t"]
    plain, environment = split_secrets(words, "serve")
    assert plain == ["--ctx-size", "8", "--metrics"]
    assert environment == {"LLAMA_API_KEY": "a,b", "LLAMADO_CLUSTER_TOKEN": "t"}


VARIABLES = sorted({name for flag in FLAGS if flag.secret for name in flag.env})


def test_children_of_a_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "secret")
    config = tmp_path / "config.yaml"
    config.write_text(
        "models: {a: {cmd: x, proxy: 'http://h:1'}, b: {cmd: x, proxy: 'http://h:1', env: ['T=${env.HF_TOKEN}']}}"
    )
    a, b = (model.launch.env for model in read_swap_config(config).models)
    assert "secret" not in a.values() and b["T"] == "secret" and not set(VARIABLES) & set(b)
    options = {"cluster_token": ("secret-1",), "ctx_size": ("8",)}
    assert presets.arguments(options) == ["--ctx-size", "8"] and "secret" not in presets.ini_text("a", options, {})
    assert presets.secrets(options) == {"HF_TOKEN": "secret", "LLAMADO_CLUSTER_TOKEN": "secret-1"}


@pytest.mark.parametrize("on", ["here", "ray"])
def test_commands_of_a_cluster_hold_no_secrets(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets of the file and the environment reach servers and gateway as variables."""
    monkeypatch.setenv("HF_TOKEN", "secret-hub")

    def given(command: str) -> dict[str, str]:
        flags = [flag for flag in FLAGS if flag.secret and command in flag.commands and flag.key != "hf_token"]
        return {flag.key.replace("_", "-"): f"secret-{command}-{flag.key}" for flag in flags}

    keys = {"port": 0, "workers": 1, "replicas": 2, "on": on, "server": given("serve"), "gateway": given("gateway")}
    config = parse_cluster(keys, "x")
    services = ray_services(config) if on == "ray" else local_services(config, Path("/m.gguf"))
    assert len(services) == 5
    for service in services:
        assert "secret-" not in str(service.command)
        command = {ServiceRole.SERVER: "serve", ServiceRole.GATEWAY: "gateway"}.get(service.role)
        if command:
            assert set(given(command).values()) <= set(service.environment.values())
        if command == "serve":
            assert service.environment["HF_TOKEN"] == "secret-hub"


def test_secrets_of_a_command_line_are_found_however_they_are_spelled() -> None:
    words = ["--api-key=a", "--api_key", "b", "--alias", "--x", "--cluster_token=c=d", "-hft", "h", "--metrics"]
    assert split_secrets(words, "serve") == (
        ["--alias", "--x", "--metrics"],
        {"LLAMA_API_KEY": "a,b", "LLAMADO_CLUSTER_TOKEN": "c=d", "HF_TOKEN": "h"},
    )


def test_a_cluster_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMADO_ADMIN_KEY", "secret-1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    seen: dict[str, Any] = {}

    def popen(command: list[str], **options: Any) -> None:
        seen.update(options, command=command)
        raise InterruptedError

    monkeypatch.setattr(start.subprocess, "Popen", popen)
    with pytest.raises(InterruptedError):
        start.start_in_background("x", ["--nodes", "2"], ["--api-key", "secret-2"])
    assert "secret" not in " ".join(seen["command"])
    assert seen["env"]["LLAMADO_ADMIN_KEY"] == "secret-1"
    assert json.loads(seen["env"]["LLAMADO_UP_SERVER_FLAGS"]) == ["--api-key", "secret-2"]
    monkeypatch.setenv("LLAMADO_UP_SERVER_FLAGS", seen["env"]["LLAMADO_UP_SERVER_FLAGS"])
    assert "LLAMADO_UP_SERVER_FLAGS" not in secret_values.child_environment()
