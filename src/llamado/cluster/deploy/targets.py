"""What files can be written for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llamado.cluster.deploy.containers import compose, dockerfile
from llamado.cluster.deploy.deployment import Deployment, DeploymentError
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


def files_for(target: str, what: Deployment) -> dict[str, str]:
    """Texts of the files of a target, by their paths. Raises FlagError."""
    return TARGETS[target](what)


def write(files: dict[str, str], folder: Path) -> list[Path]:
    """Writes files; none that is there and says something else. Raises DeploymentError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        other = [name for name, text in files.items() if _differs(folder / name, text)]
        if other:
            raise DeploymentError(f"{folder} has other files of these names: {', '.join(other)}; give an empty --out")
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    except OSError as error:
        raise DeploymentError(f"{folder}: {error.strerror or error}") from error
    return [folder / name for name in files]


def _differs(path: Path, text: str) -> bool:
    return path.exists() and path.read_bytes() != text.encode()
