"""`llamado deploy`: files with which compose, systemd, Kubernetes and others run servers and workers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamado.flags import Parsed
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
"""Fields of a Deployment by the flags that say them."""


def run_deploy(flags: Parsed, target: str, file: str | None, serve: Sequence[str]) -> int:
    """Print the files of a target, or write them; `file`: a cluster.yaml; `serve`: flags of `llamado serve`.

    Raises FlagError, ClusterFileError and DeploymentError.
    """
    from llamado.cluster.deploy.deployment import Deployment, SecretText
    from llamado.cluster.deploy.targets import files_for, write

    given: dict[str, Any] = {field: flags.values[flag] for flag, field in _FIELDS.items()}
    if flags.gateway:
        given["gateway"] = ()
    if file is None:
        what = Deployment(serve=tuple(serve), **given)
    else:
        said = {field: given[field] for flag, field in _FIELDS.items() if flag in flags.given}
        what = _of_file(file, target, serve, said | ({"gateway": ()} if flags.gateway else {}))
    files = files_for(target, what)
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


def _of_file(file: str, target: str, serve: Sequence[str], given: dict[str, Any]) -> Deployment:
    from llamado.cluster.deploy.from_file import deployment_of
    from llamado.cluster.file import read_cluster
    from llamado.commands.up.start import server_options

    config = read_cluster(Path(file))
    if "gateway" in given and config.gateway:
        del given["gateway"]  # the file says more of it
    more = {name: tuple(value) if isinstance(value, list) else value for name, value in server_options(serve).items()}
    config = dataclasses.replace(config, server={**config.server, **more})
    return deployment_of(config, file, target, **given)
