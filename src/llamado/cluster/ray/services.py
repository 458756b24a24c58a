"""What a cluster on Ray is made of: servers and workers wherever Ray has room, and a gateway on this machine.

A server and its workers may come back elsewhere at any time, so a gateway always stands before the servers, and workers
that come back join their server with its token.
"""

from __future__ import annotations

import os
from pathlib import Path

from llamado.cluster.file import ActorConfig, ClusterConfig, WorkerConfig
from llamado.cluster.services import (
    Addresses,
    Ports,
    Reservation,
    Service,
    ServiceRole,
    alias_of,
    cluster_token,
    gateway_of,
    prefix_of,
    server_arguments,
)
from llamado.flags import memory_size, secrets_of, split_secrets

_FAILOVER = "2"
"""Seconds after which a lost worker's layers go to the others: it comes back at another address, if at all."""


def services_on_ray(config: ClusterConfig) -> list[Service]:
    """The services in the order of starting. Raises ClusterFileError, and FlagError for flags of the server."""
    options, secrets_given = split_secrets(server_arguments(config.server, ours=True), "serve")
    for flag, value in (
        ("alias", alias_of(config.model)),
        ("threads", str(config.ray.server.cpus)),
        ("rpc-failover", _FAILOVER),
    ):
        if flag not in config.server:
            options = [f"--{flag}", value, *options]
    token, prefix = cluster_token(config), prefix_of(config.server)
    workers: list[Service] = []
    servers: list[Service] = []
    for replica in range(1, config.replicas + 1):
        tag = f"{replica}." if config.replicas > 1 else ""
        own = [_worker(f"worker{tag}{n}", worker, config) for n, worker in enumerate(config.worker_list, 1)]
        workers += own
        names = tuple(worker.name for worker in own)
        servers.append(
            Service(
                name=f"server{replica}" if tag else "server",
                role=ServiceRole.SERVER,
                host="",
                port=0,
                command=("serve", "-m", _model(config.model), Addresses("--rpc", names), *options),
                environment={**secrets_of("serve"), **token, **secrets_given},
                prefix=prefix,
                needs=names,
                # Proportions are told for all workers.
                goes_without=str(config.server.get("tensor-split", "auto")) in ("auto", "memory"),
                reserves=_reservation(config.ray.server, "ray.server.memory"),
            )
        )
    with Ports() as ports:
        port = ports.free(config.host, config.port)
    home = [server.name for server in servers]
    replicas = Addresses("--replica", tuple(home), "http://", prefix)
    return [*workers, *servers, gateway_of(config, port, home, [replicas])]


def _worker(name: str, worker: WorkerConfig, config: ClusterConfig) -> Service:
    if not worker.here:
        return Service(name=name, role=ServiceRole.WORKER, host=worker.host, port=worker.port)
    usual = config.ray.worker
    own = ActorConfig(
        cpus=worker.threads or usual.cpus,
        memory=usual.memory if worker.mem is None else worker.mem,
        node=worker.node or usual.node,
    )
    command = ["worker", "-t", str(own.cpus)]
    if worker.device:
        command += ["-d", worker.device]
    if own.memory is not None:
        command += ["-m", str(own.memory)]  # what it lends
    return Service(
        name=name,
        role=ServiceRole.WORKER,
        host="",
        port=0,
        command=tuple(command),
        reserves=_reservation(own, f"{name}: memory"),
    )


def _reservation(actor: ActorConfig, where: str) -> Reservation:
    memory = 0 if actor.memory is None else memory_size(str(actor.memory), where)
    return Reservation(actor.cpus, memory, actor.node)


def _model(spec: str) -> str:
    """A name is fetched by the nodes; a file has to be on each of them, at the same path."""
    return os.path.abspath(spec) if spec.endswith(".gguf") and "://" not in spec and Path(spec).exists() else spec
