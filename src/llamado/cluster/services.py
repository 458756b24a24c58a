"""Services of a cluster: each process with its command, environment and dependencies."""

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
"""Variable of the gateway's admin key, required to drain replicas."""
CLUSTER_TOKEN = "LLAMADO_CLUSTER_TOKEN"
"""Variable of the token that authorizes workers to join a server and to be drained."""


class ProgramMissing(LlamadoError):
    """A llama.cpp program is not in PATH."""


class ServiceRole(enum.StrEnum):
    """Role of a service. The order is the order of starting."""

    WORKER = "worker"
    TAP = "tap"
    SERVER = "server"
    GATEWAY = "gateway"


@dataclass(frozen=True)
class AddressFlag:
    """A flag with the addresses of other services, filled in when the command starts."""

    flag: str
    services: tuple[str, ...]
    before: str = ""
    after: str = ""
    """Text before and after each address."""

    def value(self, address: str) -> str:
        """Return the flag's value for one address."""
        return f"{self.before}{address}{self.after}"

    def arguments(self, addresses: Sequence[str]) -> list[str]:
        """Return the flag with the addresses of the services that are ready; [] if none is."""
        return [self.flag, ",".join(map(self.value, addresses))] if addresses else []


@dataclass(frozen=True)
class Reservation:
    """Resources that Ray reserves on one node for a process. `memory`: bytes, 0 for none; `node`: address or id."""

    cpus: int
    memory: int = 0
    node: str | None = None


@dataclass(frozen=True, kw_only=True)
class Service:
    """One process of a cluster. A service without a command runs on another machine."""

    name: str
    role: ServiceRole
    host: str
    """Address at which this machine reaches it."""
    port: int
    command: tuple[str | AddressFlag, ...] = ()
    """Its command line. On Ray: the arguments of `llamado` without an address, which the node adds."""
    reservation: Reservation | None = None
    """Resources reserved by Ray; None: a process of this machine."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables in addition to those of this process."""
    needs: tuple[str, ...] = ()
    """Services that must be ready before it starts."""
    restarts_with_needs: bool = False
    """It must restart after a service that it needs has ended."""
    prefix: str = ""
    """Prefix of all paths of a server."""
    certificate: str | None = None
    """PEM file with the server's certificate; None: plain HTTP."""
    needs_once: bool = False
    """It needs the others for its first start only; a restart uses those that are ready."""

    @property
    def address(self) -> str:
        """`host:port`; "" if it has none yet."""
        if not self.port:
            return ""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Base URL of a server or gateway."""
        return f"{'https' if self.certificate else 'http'}://{self.address}{self.prefix}"

    def tls_verification(self) -> ssl.SSLContext | bool:
        """Return the TLS verification for requests to it: the certificate must equal the one in its file.

        Its name and signature do not matter. True (httpx's default) without a certificate. Raises ClusterFileError.
        """
        if self.certificate is None:
            return True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # the certificate has the name that other machines use
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(self.certificate)
        except OSError as error:  # ssl.SSLError is one
            reason = error.strerror or error
            raise ClusterFileError(f"ssl-cert-file: {self.certificate}: not a PEM certificate: {reason}") from None
        return context

    def without_worker(self, address: str, names: Sequence[str]) -> Service:
        """Return this server without its worker at `address`. `names`: the worker's services, that is, it and its tap.

        The worker's share of `--tensor-split` is removed too.
        """
        command = list(self.command)
        at = next(i for i, word in enumerate(command) if word == "--rpc" or isinstance(word, AddressFlag))
        found = command[at]
        if isinstance(found, AddressFlag):
            workers = [*found.services]
            place = next(i for i, name in enumerate(workers) if name in names)
        else:
            workers = str(command[at + 1]).split(",")
            place = workers.index(address)
        left = [*workers[:place], *workers[place + 1 :]]
        if isinstance(found, AddressFlag):
            command[at : at + 1] = [replace(found, services=tuple(left))] if left else []
        else:
            command[at : at + 2] = ["--rpc", ",".join(left)] if left else []
        if "--tensor-split" in command:
            at = command.index("--tensor-split") + 1
            shares = re.split("[,/]+", str(command[at]))
            if not left:
                del command[at - 1 : at + 1]
            elif len(shares) == len(workers) + 1:  # otherwise auto or memory
                command[at] = ",".join([*shares[:place], *shares[place + 1 :]])
        return replace(self, command=tuple(command), needs=tuple(name for name in self.needs if name not in names))


class Ports:
    """Free ports of this machine. A reserved port stays taken until this is closed."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.close()

    def reserve(self, host: str, port: int = 0) -> int:
        """Reserve and return `port`, or any free port if it is 0. Raises ClusterFileError."""
        held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._held.append(held)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
            held.listen(1)  # otherwise another socket with SO_REUSEADDR can bind it as well
        except OSError as error:
            raise ClusterFileError(
                f"{host}:{port}: {error.strerror or error}; choose another port (0: any free one)"
            ) from None
        found: int = held.getsockname()[1]
        return found


def local_services(config: ClusterConfig, model: Path) -> list[Service]:
    """Return the services of a cluster on this machine, in the order of starting. `model`: the model's file.

    Raises ClusterFileError, FlagError for flags of the server, and ProgramMissing.
    """
    with Ports() as ports:
        return _local_services(config, model, ports)


def _local_services(config: ClusterConfig, model: Path, ports: Ports) -> list[Service]:
    programs = _Programs.find(config.engine)
    given = server_arguments(config.server, is_llamado=config.engine == "llamado")
    options, secrets_given = split_secrets(given, "serve")
    if "alias" not in config.server:
        options = ["--alias", model_alias(config.model), *options]
    host, port = config.host, ports.reserve(config.host, config.port)
    n_local = sum(worker.is_local for worker in config.worker_list) + 1
    threads = max(1, cores() // (n_local * config.replicas))
    if "threads" not in config.server and n_local * config.replicas > 1:
        options = ["--threads", str(threads), *options]
    services: list[Service] = []
    for number in range(1, config.replicas + 1):
        tag = f"{number}." if config.replicas > 1 else ""
        endpoints, workers = _workers_of(config, tag, programs, threads, ports)
        where = ("127.0.0.1", ports.reserve("127.0.0.1")) if config.has_gateway else (host, port)
        arguments = ["-m", str(model), "--host", where[0], "--port", str(where[1])]
        if endpoints:
            arguments += ["--rpc", ",".join(service.address for service in endpoints)]
            alike = all(w.is_local and not (w.threads or w.mem or w.device) for w in config.worker_list)
            if alike and "tensor-split" not in config.server:
                # Nodes on one machine show the cost of a split, so all get equal shares.
                arguments += ["--tensor-split", ",".join("1" * (len(endpoints) + 1))]
        server = Service(
            name=f"server{number}" if tag else "server",
            role=ServiceRole.SERVER,
            host=reachable_host(where[0]),
            port=where[1],
            command=(*programs.server, *arguments, *options),
            environment={
                **secrets_of("serve"),
                **(cluster_token(config) if endpoints and config.engine == "llamado" else {}),
                **secrets_given,
            },
            needs=tuple(service.name for service in workers),
            restarts_with_needs=config.engine == "llama.cpp",
            prefix=server_prefix(config.server),
            certificate=_certificate(config.server),
        )
        server.tls_verification()  # report a wrong certificate before anything starts
        services += [*workers, server]
    if config.has_gateway:
        servers = [service for service in services if service.role is ServiceRole.SERVER]
        replicas = [word for server in servers for word in ("--replica", server.url)]
        services.append(gateway_service(config, port, [server.name for server in servers], replicas))
    return sorted(services, key=lambda service: list(ServiceRole).index(service.role))


def _workers_of(
    config: ClusterConfig, tag: str, programs: _Programs, threads: int, ports: Ports
) -> tuple[list[Service], list[Service]]:
    """Return the services that one server connects to (workers, or taps in front of them), and all their services."""
    endpoints: list[Service] = []
    services: list[Service] = []
    for number, worker in enumerate(config.worker_list, 1):
        if tag and not worker.is_local and config.engine == "llama.cpp":
            raise ClusterFileError(f"workers[{number}]: ggml-rpc-server serves one replica at a time")
        if tag and worker.is_local and worker.port:
            raise ClusterFileError(f"workers[{number}].port: each replica gets its own worker: leave the port out")
        services.append(_worker(number, f"{tag}{number}", worker, programs, threads, ports))
        if worker.link is not None:
            services.append(_tap(f"{tag}{number}", services[-1], worker.link, ports))
        endpoints.append(services[-1])
    return endpoints, services


def cluster_token(config: ClusterConfig) -> dict[str, str]:
    """Return the environment with the cluster token: the configured one, or a random one."""
    given = config.server.get("cluster-token") or secret(CLUSTER_TOKEN)
    return {CLUSTER_TOKEN: str(given or secrets.token_hex(16))}


def _certificate(options: Mapping[str, Option]) -> str | None:
    found = options.get("ssl-cert-file")
    return str(found) if found else None


def server_prefix(options: Mapping[str, Option]) -> str:
    """Return the prefix of all paths of a server."""
    return str(options.get("api-prefix", "")).rstrip("/")


def gateway_service(
    config: ClusterConfig, port: int, servers: Sequence[str], replicas: Sequence[str | AddressFlag]
) -> Service:
    """Return the gateway, which runs on this machine. `servers`: their names; `replicas`: the flags with their URLs.

    Raises ClusterFileError and FlagError.
    """
    options, secrets_given = split_secrets(flag_arguments(config.gateway, "gateway"), "gateway")
    arguments = ["--host", config.host, "--port", str(port)]
    admin_key = config.gateway.get("admin-key") or secret(ADMIN_KEY) or secrets.token_hex(16)
    gateway = Service(
        name="gateway",
        role=ServiceRole.GATEWAY,
        host=reachable_host(config.host),
        port=port,
        command=(*own_command("gateway"), *arguments, *replicas, *options),
        environment={**secrets_of("gateway"), **secrets_given, ADMIN_KEY: str(admin_key)},
        needs=tuple(servers),
        # A restarted gateway must serve the replicas that are ready.
        needs_once=True,
        certificate=_certificate(config.gateway),
    )
    gateway.tls_verification()
    return gateway


@dataclass(frozen=True)
class _Programs:
    """Commands of an engine's programs."""

    server: tuple[str, ...]
    worker: tuple[str, ...]
    is_llamado: bool

    @classmethod
    def find(cls, engine: str) -> _Programs:
        if engine == "llamado":
            return cls(tuple(own_command("serve")), tuple(own_command("worker")), True)
        return cls((_find_program("llama-server"),), (_find_program("ggml-rpc-server", "rpc-server"),), False)


def _find_program(*names: str) -> str:
    for name in names:
        for folder in os.get_exec_path():
            found = shutil.which(name, path=folder)
            if found and Path(found).resolve().name != "llamado":  # not our own program under llama.cpp's name
                return found
    raise ProgramMissing(
        f"--engine llama.cpp: no {' or '.join(names)} in PATH; build llama.cpp with -DGGML_RPC=ON and add its bin "
        "folder to PATH"
    )


def _worker(number: int, tag: str, worker: WorkerConfig, programs: _Programs, threads: int, ports: Ports) -> Service:
    name = f"worker{tag}"
    if not worker.is_local:
        return Service(name=name, role=ServiceRole.WORKER, host=worker.host, port=worker.port)
    port = ports.reserve(worker.host, worker.port)
    command = [*programs.worker, "-H", worker.host, "-p", str(port), "-t", str(worker.threads or threads)]
    if worker.device:
        command += ["-d", worker.device]
    if worker.mem is not None:
        if not programs.is_llamado:
            raise ClusterFileError(f"workers[{number}].mem: ggml-rpc-server always offers all memory: leave it out")
        command += ["-m", str(worker.mem)]
    if worker.models_dir is not None:
        if not programs.is_llamado:
            raise ClusterFileError(
                f"workers[{number}].models_dir: ggml-rpc-server reads no files, weights are sent to it: leave it out"
            )
        command += ["--models-dir", worker.models_dir]
    return Service(name=name, role=ServiceRole.WORKER, host=worker.host, port=port, command=tuple(command))


def _tap(tag: str, worker: Service, link: LinkConfig, ports: Ports) -> Service:
    port = ports.reserve("127.0.0.1")
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


def model_alias(model: str) -> str:
    """Return the model's name in the API: the given name, or that of its file."""
    return Path(model).stem if model.endswith(".gguf") else model


def reachable_host(host: str) -> str:
    """Return the address for requests to a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def server_arguments(options: Mapping[str, Option], *, is_llamado: bool) -> list[str]:
    """Return the server flags of a cluster.yaml; those for llamado are checked as well. Raises FlagError."""
    return flag_arguments(options, "server", "serve", check=is_llamado)


def flag_arguments(options: Mapping[str, Option], key: str, command: str = "", *, check: bool = True) -> list[str]:
    """Return the arguments for the flags under a key of cluster.yaml.

    `command`: the command that takes them, by default named like the key. `check`: parse them as the command would.
    Raises FlagError.
    """
    command = command or key
    flags = {name.removeprefix("--"): flag for flag in FLAGS if command in flag.commands for name in _long_names(flag)}
    arguments: list[str] = []
    for name, value in options.items():
        flag = flags.get(name)
        if flag is None:
            near = difflib.get_close_matches(name, flags, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise FlagError(f"{key}.{name}: unknown flag{hint} (all flags: llamado {command} --help)")
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


def _long_names(flag: Flag) -> Iterator[str]:
    return (spelling for spelling in flag.names + flag.off_names if spelling.startswith("--"))


def _switch(flag: Flag, where: str, name: str, value: Any) -> list[str]:
    if not isinstance(value, bool):
        raise FlagError(f"{where}: expected true or false, got {value!r}")
    if value:
        return [f"--{name}"]
    others = flag.off_names if f"--{name}" in flag.names else flag.names
    off = next((spelling for spelling in others if spelling.startswith("--")), None)
    return [] if off is None else [off]
