"""Services of a cluster on Ray: servers and workers on Ray's nodes, and a gateway on this machine.

Ray may restart a server or worker at another address at any time. Clients therefore always connect to the gateway, and
a restarted worker joins its server again with the cluster token.
"""

from __future__ import annotations

import os
from pathlib import Path

from llamado.cluster.file import ActorConfig, ClusterConfig, WorkerConfig
from llamado.cluster.services import (
    AddressFlag,
    Ports,
    Reservation,
    Service,
    ServiceRole,
    cluster_token,
    gateway_service,
    model_alias,
    server_arguments,
    server_prefix,
)
from llamado.flags import memory_size, secrets_of, split_secrets

_FAILOVER = "2"
"""Default of --rpc-failover on Ray, in seconds: a lost worker never returns at its old address."""


def ray_services(config: ClusterConfig) -> list[Service]:
    """Return the services in the order of starting. Raises ClusterFileError, and FlagError for flags of the server."""
    options, secrets_given = split_secrets(server_arguments(config.server, is_llamado=True), "serve")
    for flag, value in (
        ("alias", model_alias(config.model)),
        ("threads", str(config.ray.server.cpus)),
        ("rpc-failover", _FAILOVER),
    ):
        if flag not in config.server:
            options = [f"--{flag}", value, *options]
    token, prefix = cluster_token(config), server_prefix(config.server)
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
                command=("serve", "-m", _model(config.model), AddressFlag("--rpc", names), *options),
                environment={**secrets_of("serve"), **token, **secrets_given},
                prefix=prefix,
                needs=names,
                # Explicit shares in --tensor-split need all workers.
                needs_once=str(config.server.get("tensor-split", "auto")) in ("auto", "memory"),
                reservation=_reservation(config.ray.server, "ray.server.memory"),
            )
        )
    with Ports() as ports:
        port = ports.reserve(config.host, config.port)
    home = [server.name for server in servers]
    replicas = AddressFlag("--replica", tuple(home), "http://", prefix)
    return [*workers, *servers, gateway_service(config, port, home, [replicas])]


def _worker(name: str, worker: WorkerConfig, config: ClusterConfig) -> Service:
    if not worker.is_local:
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
        command += ["-m", str(own.memory)]  # memory that it offers to the server
    return Service(
        name=name,
        role=ServiceRole.WORKER,
        host="",
        port=0,
        command=tuple(command),
        reservation=_reservation(own, f"{name}: memory"),
    )


def _reservation(actor: ActorConfig, where: str) -> Reservation:
    memory = 0 if actor.memory is None else memory_size(str(actor.memory), where)
    return Reservation(actor.cpus, memory, actor.node)


def _model(spec: str) -> str:
    """Return the model for the nodes: they download a name; a file must be on each node at the same absolute path."""
    return os.path.abspath(spec) if spec.endswith(".gguf") and "://" not in spec and Path(spec).exists() else spec
