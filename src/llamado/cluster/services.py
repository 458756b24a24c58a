"""What a cluster is made of: each process, how it is started, and what must be ready before it."""

from __future__ import annotations

import difflib
import enum
import os
import re
import secrets
import shutil
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from llamado.cluster.file import ClusterConfig, ClusterFileError, LinkConfig, Option, WorkerConfig
from llamado.devices.limits import cores
from llamado.errors import LlamadoError
from llamado.flags import FLAGS, Flag, FlagError, FlagParser, add_flags, parse, secrets_of, split_secrets
from llamado.installation import own_command
from llamado.processes.secret_values import secret

ADMIN_KEY = "LLAMADO_ADMIN_KEY"
"""Variable of the key with which replicas of the gateway are drained."""
CLUSTER_TOKEN = "LLAMADO_CLUSTER_TOKEN"
"""Variable of the token with which workers of a server join it and are drained."""


class ProgramMissing(LlamadoError):
    """A program of llama.cpp's is not in PATH."""


class ServiceRole(enum.StrEnum):
    """What a service does, in the order in which services start."""

    WORKER = "worker"
    TAP = "tap"
    SERVER = "server"
    GATEWAY = "gateway"


@dataclass(frozen=True)
class Addresses:
    """Words of a command that are known when it starts: a flag with the addresses of services, wherever they are then;
    none while none of them is ready.
    """

    flag: str
    services: tuple[str, ...]
    before: str = ""
    after: str = ""
    """What stands before and after each address."""

    def of(self, address: str) -> str:
        """How the flag names who is at an address."""
        return f"{self.before}{address}{self.after}"

    def words(self, found: Sequence[str]) -> list[str]:
        """The flag for the addresses of those that are ready."""
        return [self.flag, ",".join(map(self.of, found))] if found else []


@dataclass(frozen=True)
class Reservation:
    """What Ray reserves on one node for a process. `memory`: bytes, 0 for none; `node`: its address or id."""

    cpus: int
    memory: int = 0
    node: str | None = None


@dataclass(frozen=True, kw_only=True)
class Service:
    """One process of a cluster; without a command one on another machine."""

    name: str
    role: ServiceRole
    host: str
    """Where it is reached from this machine."""
    port: int
    command: tuple[str | Addresses, ...] = ()
    """Its command; on Ray what comes behind `llamado`, without an address, which its node decides."""
    reserves: Reservation | None = None
    """What Ray reserves for it; None: it is a process of this machine."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables besides those of this process."""
    needs: tuple[str, ...] = ()
    """Services that must be ready before it starts."""
    follows: bool = False
    """Whether it is of no use once one that it needs has ended, so that it has to be started again."""
    prefix: str = ""
    """Before all paths of a server."""
    certificate: str | None = None
    """PEM file of the certificate that a server shows; None: it is asked in the plain."""
    goes_without: bool = False
    """Whether it needs the others only the first time: later it starts with those that are there."""

    @property
    def address(self) -> str:
        """`host:port`; "" while none is known."""
        if not self.port:
            return ""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Where a server is asked."""
        return f"{'https' if self.certificate else 'http'}://{self.address}{self.prefix}"

    def trust(self) -> ssl.SSLContext | bool:
        """What its certificate is checked by: it must be the one in its file, whatever name and signature it has.

        Raises ClusterFileError.
        """
        if self.certificate is None:
            return True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # it is for the name by which others reach this machine
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(self.certificate)
        except OSError as error:  # ssl.SSLError is one
            reason = error.strerror or error
            raise ClusterFileError(f"ssl-cert-file: {self.certificate}: no certificate in PEM: {reason}") from None
        return context

    def without(self, address: str, names: Sequence[str]) -> Service:
        """This server as it is started once its worker at `address` is gone; `names`: the services that were there."""
        command = list(self.command)
        at = next(i for i, word in enumerate(command) if word == "--rpc" or isinstance(word, Addresses))
        found = command[at]
        if isinstance(found, Addresses):
            workers = [*found.services]
            place = next(i for i, name in enumerate(workers) if name in names)
        else:
            workers = str(command[at + 1]).split(",")
            place = workers.index(address)
        left = [*workers[:place], *workers[place + 1 :]]
        if isinstance(found, Addresses):
            command[at : at + 1] = [replace(found, services=tuple(left))] if left else []
        else:
            command[at : at + 2] = ["--rpc", ",".join(left)] if left else []
        if "--tensor-split" in command:
            at = command.index("--tensor-split") + 1
            shares = re.split("[,/]+", str(command[at]))
            if not left:
                del command[at - 1 : at + 1]
            elif len(shares) == len(workers) + 1:  # or else auto, or memory
                command[at] = ",".join([*shares[:place], *shares[place + 1 :]])
        return replace(self, command=tuple(command), needs=tuple(name for name in self.needs if name not in names))


class Ports:
    """Ports that nobody listens on, each given out once while it is open."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.close()

    def free(self, host: str, port: int = 0) -> int:
        """`port`, or any if that is 0. Raises ClusterFileError."""
        held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._held.append(held)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
            held.listen(1)  # without it another socket with SO_REUSEADDR may have it as well
        except OSError as error:
            raise ClusterFileError(
                f"{host}:{port}: {error.strerror or error}; choose another port (0: any free one)"
            ) from None
        found: int = held.getsockname()[1]
        return found


def services_of(config: ClusterConfig, model: Path) -> list[Service]:
    """What a cluster is made of, in the order of starting. `model`: its file.

    Raises ClusterFileError, FlagError for flags of the server, ProgramMissing.
    """
    with Ports() as ports:
        return _services_of(config, model, ports)


def _services_of(config: ClusterConfig, model: Path, ports: Ports) -> list[Service]:
    programs = _Programs.of(config.engine)
    given = server_arguments(config.server, ours=config.engine == "llamado")
    options, secrets_given = split_secrets(given, "serve")
    if "alias" not in config.server:
        options = ["--alias", alias_of(config.model), *options]
    host, port = config.host, ports.free(config.host, config.port)
    own = sum(worker.here for worker in config.worker_list) + 1
    threads = max(1, cores() // (own * config.replicas))
    if "threads" not in config.server and own * config.replicas > 1:
        options = ["--threads", str(threads), *options]
    services: list[Service] = []
    for number in range(1, config.replicas + 1):
        tag = f"{number}." if config.replicas > 1 else ""
        endpoints, workers = _workers_of(config, tag, programs, threads, ports)
        where = ("127.0.0.1", ports.free("127.0.0.1")) if config.has_gateway else (host, port)
        arguments = ["-m", str(model), "--host", where[0], "--port", str(where[1])]
        if endpoints:
            arguments += ["--rpc", ",".join(service.address for service in endpoints)]
            alike = all(w.here and not (w.threads or w.mem or w.device) for w in config.worker_list)
            if alike and "tensor-split" not in config.server:
                # What nodes on one machine can show is what a division costs: each gets as much as the others.
                arguments += ["--tensor-split", ",".join("1" * (len(endpoints) + 1))]
        server = Service(
            name=f"server{number}" if tag else "server",
            role=ServiceRole.SERVER,
            host=reached(where[0]),
            port=where[1],
            command=(*programs.server, *arguments, *options),
            environment={
                **secrets_of("serve"),
                **(cluster_token(config) if endpoints and config.engine == "llamado" else {}),
                **secrets_given,
            },
            needs=tuple(service.name for service in workers),
            follows=config.engine == "llama.cpp",
            prefix=prefix_of(config.server),
            certificate=_certificate(config.server),
        )
        server.trust()  # what is wrong with its certificate is said before anything is started
        services += [*workers, server]
    if config.has_gateway:
        servers = [service for service in services if service.role is ServiceRole.SERVER]
        replicas = [word for server in servers for word in ("--replica", server.url)]
        services.append(gateway_of(config, port, [server.name for server in servers], replicas))
    return sorted(services, key=lambda service: list(ServiceRole).index(service.role))


def _workers_of(
    config: ClusterConfig, tag: str, programs: _Programs, threads: int, ports: Ports
) -> tuple[list[Service], list[Service]]:
    """One server's workers as it reaches them, and all processes of theirs."""
    endpoints: list[Service] = []
    services: list[Service] = []
    for number, worker in enumerate(config.worker_list, 1):
        if tag and not worker.here and config.engine == "llama.cpp":
            raise ClusterFileError(f"workers[{number}]: ggml-rpc-server serves one replica at a time")
        if tag and worker.here and worker.port:
            raise ClusterFileError(f"workers[{number}].port: each replica has a worker of its own: leave the port out")
        services.append(_worker(number, f"{tag}{number}", worker, programs, threads, ports))
        if worker.link is not None:
            services.append(_tap(f"{tag}{number}", services[-1], worker.link, ports))
        endpoints.append(services[-1])
    return endpoints, services


def cluster_token(config: ClusterConfig) -> dict[str, str]:
    """The token with which workers join and are drained: the user's, or one that nobody else knows."""
    given = config.server.get("cluster-token") or secret(CLUSTER_TOKEN)
    return {CLUSTER_TOKEN: str(given or secrets.token_hex(16))}


def _certificate(options: Mapping[str, Option]) -> str | None:
    found = options.get("ssl-cert-file")
    return str(found) if found else None


def prefix_of(options: Mapping[str, Option]) -> str:
    """What comes before all paths of a server."""
    return str(options.get("api-prefix", "")).rstrip("/")


def gateway_of(
    config: ClusterConfig, port: int, servers: Sequence[str], replicas: Sequence[str | Addresses]
) -> Service:
    """The gateway of a cluster, on this machine, before servers of these names; `replicas`: the flags that name them.

    Raises ClusterFileError and FlagError.
    """
    options, secrets_given = split_secrets(flag_arguments(config.gateway, "gateway"), "gateway")
    arguments = ["--host", config.host, "--port", str(port)]
    admin_key = config.gateway.get("admin-key") or secret(ADMIN_KEY) or secrets.token_hex(16)
    gateway = Service(
        name="gateway",
        role=ServiceRole.GATEWAY,
        host=reached(config.host),
        port=port,
        command=(*own_command("gateway"), *arguments, *replicas, *options),
        environment={**secrets_of("gateway"), **secrets_given, ADMIN_KEY: str(admin_key)},
        needs=tuple(servers),
        # It has to be there for the servers that are.
        goes_without=True,
        certificate=_certificate(config.gateway),
    )
    gateway.trust()
    return gateway


@dataclass(frozen=True)
class _Programs:
    """How an engine's programs are started."""

    server: tuple[str, ...]
    worker: tuple[str, ...]
    own: bool

    @classmethod
    def of(cls, engine: str) -> _Programs:
        if engine == "llamado":
            return cls(tuple(own_command("serve")), tuple(own_command("worker")), True)
        return cls((_in_path("llama-server"),), (_in_path("ggml-rpc-server", "rpc-server"),), False)


def _in_path(*names: str) -> str:
    for name in names:
        for folder in os.get_exec_path():
            found = shutil.which(name, path=folder)
            if found and Path(found).resolve().name != "llamado":  # a link that gives llamado that name
                return found
    raise ProgramMissing(
        f"--engine llama.cpp: there is no {' or '.join(names)} in PATH; build llama.cpp with -DGGML_RPC=ON and add its "
        "folder bin to PATH"
    )


def _worker(number: int, tag: str, worker: WorkerConfig, programs: _Programs, threads: int, ports: Ports) -> Service:
    name = f"worker{tag}"
    if not worker.here:
        return Service(name=name, role=ServiceRole.WORKER, host=worker.host, port=worker.port)
    port = ports.free(worker.host, worker.port)
    command = [*programs.worker, "-H", worker.host, "-p", str(port), "-t", str(worker.threads or threads)]
    if worker.device:
        command += ["-d", worker.device]
    if worker.mem is not None:
        if not programs.own:
            raise ClusterFileError(f"workers[{number}].mem: ggml-rpc-server lends all memory: leave it out")
        command += ["-m", str(worker.mem)]
    if worker.models_dir is not None:
        if not programs.own:
            raise ClusterFileError(f"workers[{number}].models_dir: ggml-rpc-server is sent all weights: leave it out")
        command += ["--models-dir", worker.models_dir]
    return Service(name=name, role=ServiceRole.WORKER, host=worker.host, port=port, command=tuple(command))


def _tap(tag: str, worker: Service, link: LinkConfig, ports: Ports) -> Service:
    port = ports.free("127.0.0.1")
    command = own_command("tap", "--listen-port", str(port))
    command += ["--target-host", worker.host, "--target-port", str(worker.port)]
    command += ["--latency-ms", f"{link.latency:g}", "--jitter-ms", f"{link.jitter:g}"]
    if link.bandwidth is not None:
        command += ["--bandwidth", link.bandwidth]
    if link.all:
        command += ["--all"]
    return Service(
        name=f"tap{tag}",
        role=ServiceRole.TAP,
        host="127.0.0.1",
        port=port,
        command=tuple(command),
        needs=(worker.name,),
    )


def alias_of(model: str) -> str:
    """How the API calls a model: by its name, or its file's."""
    return Path(model).stem if model.endswith(".gguf") else model


def reached(host: str) -> str:
    """The address by which a server is asked that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def server_arguments(options: Mapping[str, Option], *, ours: bool) -> list[str]:
    """The server's flags of a cluster.yaml; `ours`: it is llamado that gets them. Raises FlagError."""
    return flag_arguments(options, "server", "serve", check=ours)


def flag_arguments(options: Mapping[str, Option], key: str, command: str = "", *, check: bool = True) -> list[str]:
    """Flags under a key of cluster.yaml, by the table of flags of a command (the key's name, if none is given).

    `check`: whether that command would take them. Raises FlagError.
    """
    command = command or key
    flags = {name.removeprefix("--"): flag for flag in FLAGS if command in flag.commands for name in _long(flag)}
    arguments: list[str] = []
    for name, value in options.items():
        flag = flags.get(name)
        if flag is None:
            near = difflib.get_close_matches(name, flags, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise FlagError(f"{key}.{name}: there is no such flag{hint} (all flags: llamado {command} --help)")
        if flag.type == "bool":
            arguments += _switch(flag, f"{key}.{name}", name, value)
            continue
        for item in value if isinstance(value, tuple) else (value,):
            text = ("on" if item else "off") if isinstance(item, bool) else str(item)
            arguments += [f"--{name}", text]
    if check:
        parser = FlagParser(prog=f"llamado {command}", add_help=False, allow_abbrev=False)
        add_flags(parser, command)
        parse(parser, command, arguments, {})
    return arguments


def _long(flag: Flag) -> Iterator[str]:
    return (spelling for spelling in flag.names + flag.off_names if spelling.startswith("--"))


def _switch(flag: Flag, where: str, name: str, value: Any) -> list[str]:
    if not isinstance(value, bool):
        raise FlagError(f"{where}: expected true or false, got {value!r}")
    if value:
        return [f"--{name}"]
    others = flag.off_names if f"--{name}" in flag.names else flag.names
    off = next((spelling for spelling in others if spelling.startswith("--")), None)
    return [] if off is None else [off]
