"""Deployments from a cluster.yaml, the file of `llamado up`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llamado.cluster.deploy.containers import MODELS
from llamado.cluster.deploy.deployment import Deployment, DeploymentError, flag_name
from llamado.cluster.file import ClusterConfig, WorkerConfig
from llamado.cluster.services import flag_arguments, model_alias, server_arguments

IN_CONTAINERS = frozenset({"compose", "docker", "helm", "kubernetes"})
"""Targets that have models in a folder of the container."""


def deployment_fields(config: ClusterConfig, source: str, target: str) -> dict[str, Any]:
    """Return the fields of a Deployment that the file sets. Error messages begin with `source`.

    Raises FlagError, and DeploymentError for settings that targets do not support.
    """
    if config.engine != "llamado":
        raise DeploymentError(f"{source}: engine: only llamado's own programs are deployed; leave it out")
    local = [worker for worker in config.worker_list if worker.is_local]
    remote = [f"{worker.host}:{worker.port}" for worker in config.worker_list if not worker.is_local]
    if local and remote:
        raise DeploymentError(f"{source}: workers: use existing workers or deploy new ones, not both")
    serve = [flag_name("serve", "model"), _model(config.model, target)]
    if "alias" not in config.server:
        serve += [flag_name("serve", "alias"), model_alias(config.model)]
    serve += server_arguments(config.server, is_llamado=True)
    if remote:
        serve += [flag_name("serve", "rpc"), ",".join(remote)]
    fields: dict[str, Any] = {
        "serve": tuple(serve),
        "replicas": config.replicas,
        "workers": len(local),
        "worker": _common_flags(local, source, target),
    }
    if config.name != "default":
        fields["name"] = config.name
    if config.port:
        fields["port"] = config.port
    if config.replicas > 1 or config.gateway:
        fields["gateway"] = tuple(flag_arguments(config.gateway, "gateway"))
    path = Path(config.model)
    if target in IN_CONTAINERS and path.exists() and path.suffix == ".gguf":
        fields["models"] = str(path.resolve().parent)
    return fields


def _model(spec: str, target: str) -> str:
    """Return the model of the deployment: a name, or a file's path in the container or on the machine."""
    path = Path(spec)
    if path.suffix != ".gguf" or "://" in spec or spec.startswith("hf:"):
        return spec
    return f"{MODELS}/{path.name}" if target in IN_CONTAINERS else str(path.resolve())


def _common_flags(workers: Iterable[WorkerConfig], source: str, target: str) -> tuple[str, ...]:
    """Return the flags of the workers. Raises DeploymentError if workers differ."""
    found: set[tuple[str, ...]] = set()
    for number, worker in enumerate(workers, 1):
        if worker.link is not None:
            raise DeploymentError(f"{source}: workers[{number}].link: slow links are for experiments; leave it out")
        flags: list[str] = []
        folders = MODELS if worker.models_dir and target in IN_CONTAINERS else worker.models_dir
        for key, value in (
            ("threads", worker.threads), ("device", worker.device), ("mem", worker.mem), ("models_dir", folders)
        ):  # fmt: skip
            if value is not None:
                flags += [flag_name("worker", key), str(value)]
        found.add(tuple(flags))
    if len(found) > 1:
        raise DeploymentError(
            f"{source}: workers: deployed workers must be equal: give all the same threads, mem, device and models_dir"
        )
    return found.pop() if found else ()


def deployment_of(config: ClusterConfig, source: str, target: str, **given: Any) -> Deployment:
    """Return the deployment of a file. Fields in `given` replace its own. Raises DeploymentError and FlagError."""
    return Deployment(**{**deployment_fields(config, source, target), **given})
