"""Targets of `llamado deploy`, and writing their files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from llamado.cluster.deploy.containers import compose, dockerfile
from llamado.cluster.deploy.deployment import Deployment, DeploymentError, SecretText
from llamado.cluster.deploy.helm import helm
from llamado.cluster.deploy.kubernetes import kubernetes
from llamado.cluster.deploy.monitoring import grafana, prometheus
from llamado.cluster.deploy.nginx import nginx
from llamado.cluster.deploy.systemd import systemd

TARGETS: dict[str, Callable[[Deployment], dict[str, str]]] = {
    "compose": compose,
    "docker": dockerfile,
    "grafana": grafana,
    "helm": helm,
    "kubernetes": kubernetes,
    "nginx": nginx,
    "prometheus": prometheus,
    "systemd": systemd,
}


def files_for(target: str, deployment: Deployment) -> dict[str, str]:
    """Return the files of a target: texts by their paths. Raises FlagError and DeploymentError."""
    return TARGETS[target](deployment)


def write(files: dict[str, str], folder: Path) -> list[Path]:
    """Write files, secrets with mode 0600. Raises DeploymentError if another file has a name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        other = [name for name, text in files.items() if _differs(folder / name, text)]
        if other:
            raise DeploymentError(f"{folder}: different files exist: {', '.join(other)}; give an empty --out folder")
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            mode = 0o600 if isinstance(text, SecretText) else 0o666
            with open(
                os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8"
            ) as file:
                if isinstance(text, SecretText):
                    os.fchmod(file.fileno(), mode)  # an existing file may have another mode
                file.write(text)
    except OSError as error:
        raise DeploymentError(f"{folder}: {error.strerror or error}") from error
    return [folder / name for name in files]


def _differs(path: Path, text: str) -> bool:
    return path.exists() and path.read_bytes() != text.encode()
