"""The command `llamado deploy`: write files for compose, systemd, Kubernetes and other targets."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamado.errors import LlamadoError
from llamado.flags import ParsedFlags
from llamado.terminal.text import print

if TYPE_CHECKING:
    from llamado.cluster.deploy.deployment import Deployment

_FIELDS = {
    "name": "name",
    "replicas": "replicas",
    "workers": "workers",
    "port": "port",
    "worker_port": "worker_port",
    "image": "image",
    "program": "program",
    "models": "models",
    "memory": "memory",
    "cpus": "cpus",
    "tls": "tls",
    "key": "key",
    "domain": "domain",
    "lws": "leader_worker_set",
}
"""Flag → field of Deployment."""
_MEMORY_LIMITS = frozenset({"compose", "helm", "kubernetes", "systemd"})
"""Targets that limit the memory of processes."""


def run_deploy(flags: ParsedFlags, target: str, file: str | None, serve: Sequence[str]) -> int:
    """Print or write the files of a target. `file`: a cluster.yaml; `serve`: flags of `llamado serve`.

    Raises FlagError, ClusterFileError and DeploymentError.
    """
    from llamado.cluster.deploy.deployment import Deployment, SecretText
    from llamado.cluster.deploy.targets import files_for, write

    given: dict[str, Any] = {field: flags.values[flag] for flag, field in _FIELDS.items()}
    if flags.gateway:
        given["gateway"] = ()
    if file is None:
        deployment = _placed(Deployment(serve=tuple(serve), **given), target, choose="models" not in flags.given)
    else:
        changes = {field: given[field] for flag, field in _FIELDS.items() if flag in flags.given}
        deployment = _of_file(file, target, serve, changes | ({"gateway": ()} if flags.gateway else {}))
    files = files_for(target, deployment)
    if target in _MEMORY_LIMITS and deployment.memory is None:
        files = files_for(target, _with_memory_limits(deployment, target))
    if flags.out:
        for path in write(files, Path(flags.out)):
            print(path)
        return 0
    shown = {name: text for name, text in files.items() if not isinstance(text, SecretText)}
    if len(files) == 1:
        print(*files.values(), end="")
    else:
        print("\n".join(f"# --- {name}\n{text}" for name, text in shown.items()), end="")
    if hidden := [name for name in files if name not in shown]:
        print(f"llamado: --out FOLDER also writes the secrets: {', '.join(hidden)}", file=sys.stderr)
    return 0


def _placed(deployment: Deployment, target: str, *, choose: bool) -> Deployment:
    """Replace the path of a local model by its path in the target.

    Containers mount a folder of models. `choose`: mount the folder of the file.
    """
    from llamado.cluster.deploy.containers import MODELS
    from llamado.cluster.deploy.deployment import flag_name
    from llamado.cluster.deploy.from_file import IN_CONTAINERS
    from llamado.flags import split_flags

    words, found = split_flags(deployment.serve, "serve", ("model",)) if deployment.parsed.model else ((), {})
    path = Path(*found.get("model", [""]))
    if len(found.get("model", [])) != 1 or not path.is_file():
        return deployment
    path = path.resolve()
    folder = path.parent if choose else Path(deployment.models).resolve()
    place = str(path)
    if target in IN_CONTAINERS:
        if not path.is_relative_to(folder):
            return deployment
        place = f"{MODELS}/{path.relative_to(folder)}"
    return dataclasses.replace(deployment, serve=(flag_name("serve", "model"), place, *words), models=str(folder))


def _with_memory_limits(deployment: Deployment, target: str) -> Deployment:
    """Set memory limits from the needs of the model, if its file is on this machine."""
    from llamado.commands.deploy.memory import planned_memory

    try:
        planned = planned_memory(deployment, target)
    except LlamadoError as error:
        print(f"llamado: no memory limits: {error}; --memory SIZE sets them", file=sys.stderr)
        return deployment
    worker = f", each worker {planned.worker}" if deployment.workers else ""
    print(f"llamado: memory of each server {planned.server}{worker}: {planned.text}", file=sys.stderr)
    return dataclasses.replace(deployment, memory=planned.server, worker_memory=planned.worker)


def _of_file(file: str, target: str, serve: Sequence[str], given: dict[str, Any]) -> Deployment:
    from llamado.cluster.deploy.from_file import deployment_of
    from llamado.cluster.file import read_cluster
    from llamado.commands.up.start import server_options

    config = read_cluster(Path(file))
    if "gateway" in given and config.gateway:
        del given["gateway"]  # the file configures it in more detail
    more = {name: tuple(value) if isinstance(value, list) else value for name, value in server_options(serve).items()}
    config = dataclasses.replace(config, server={**config.server, **more})
    return deployment_of(config, file, target, **given)
