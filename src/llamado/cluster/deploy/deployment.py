"""What is deployed: how many servers and workers, and their commands, spelled as the table of flags has it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from llamado.errors import LlamadoError
from llamado.flags import FLAGS, Flag, FlagParser, Kind, Parsed, add_flags, parse

_SIZE = re.compile(r"\d+(?:\.\d+)?[KMGT]?")
_MODELS = frozenset({"model", "hf_repo", "model_url", "models_dir", "models_preset", "llama_swap"})
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")


class DeploymentError(LlamadoError):
    """What is asked for cannot be deployed."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What is deployed. `serve`: flags of `llamado serve`, as given."""

    serve: tuple[str, ...] = ()
    name: str = "llamado"
    replicas: int = 1
    workers: int = 0
    port: int = 8080
    worker_port: int = 50052
    image: str = "llamado:latest"
    program: str = "/usr/local/bin/llamado"
    models: str = "/srv/models"
    """Folder of models on the machine; /models in containers."""
    memory: str | None = None
    """Most memory of a server, and of a worker: 16G."""
    cpus: float | None = None
    tls: bool = False
    """Whether servers and workers are reached by TLS, with keys that the target keeps."""
    key: bool = False
    """Whether clients need a key, which the target keeps."""
    domain: str = "_"
    """Name by which clients come (nginx)."""
    worker: tuple[str, ...] = ()
    """Flags of `llamado worker` that all workers get."""
    gateway: tuple[str, ...] | None = None
    """Flags of the gateway before the servers; None: there is none."""
    leader_worker_set: bool = False
    """Whether Kubernetes' LeaderWorkerSet groups a server with its workers, instead of a StatefulSet of workers."""

    def __post_init__(self) -> None:
        """Raises DeploymentError."""
        for name, value, least in (("--replicas", self.replicas, 1), ("--workers", self.workers, 0)):
            if not least <= value <= 1000:
                raise DeploymentError(f"{name}: expected {least} to 1000, got {value}")
        for name, port in (("--port", self.port), ("--worker-port", self.worker_port)):
            if not 0 < port < 65536:
                raise DeploymentError(f"{name}: expected 1 to 65535, got {port}")
        if self.memory is not None and not _SIZE.fullmatch(self.memory):
            raise DeploymentError(f"--memory: expected a size as 16G or 800M, got {self.memory!r}")
        if self.cpus is not None and not 0 < self.cpus < 10_000:
            raise DeploymentError(f"--cpus: expected a number above 0, got {self.cpus}")
        if not _NAME.fullmatch(self.name):
            raise DeploymentError(f"--name: expected lower-case letters, digits and dashes, got {self.name!r}")
        for text in (self.image, self.program, self.models, self.domain):
            if not text or any(c.isspace() or c in "\"'`$;{}\\" or ord(c) < 32 for c in text):
                raise DeploymentError(f"{text!r} holds characters that these files cannot")

    @property
    def parsed(self) -> Parsed:
        """The given flags of `llamado serve`. Raises FlagError."""
        parser = FlagParser(prog="llamado serve", allow_abbrev=False)
        add_flags(parser, "serve")
        return parse(parser, "serve", list(self.serve), {})[0]

    def serve_command(self, *more: str, rpc: Sequence[str] = (), host: str | None = None) -> list[str]:
        """Arguments of `llamado` for a server: what was given, and address, workers and metrics.

        Raises FlagError for flags that `llamado serve` does not have, and DeploymentError.
        """
        given = self.parsed.given
        ours = [key for key in ("host", "port") if key in given]
        if ours:
            raise DeploymentError(f"{spelled('serve', ours[0])} is set here: give {spelled('serve', 'port')} before --")
        if not given & _MODELS:
            raise DeploymentError("which model? llamado deploy TARGET -- -m MODEL")
        if rpc and "rpc" in given:
            raise DeploymentError(f"{spelled('serve', 'rpc')} and --workers: workers that are there, or new ones?")
        words = ["serve", *self.serve]
        if "metrics" not in given:
            words.append(spelled("serve", "metrics"))
        for key, value in (("host", host), ("port", str(self.port))):
            if value is not None:
                words += [spelled("serve", key), value]
        if rpc:
            words += [spelled("serve", "rpc"), ",".join(rpc)]
        return [*words, *more]

    def worker_command(self, *more: str, host: str) -> list[str]:
        """Arguments of `llamado` for a worker that keeps what it was sent on disk."""
        address = [spelled("worker", "host"), host, spelled("worker", "port"), str(self.worker_port)]
        return ["worker", *address, spelled("worker", "cache"), *self.worker, *more]

    def gateway_command(self, *more: str, servers: Sequence[str], host: str) -> list[str]:
        """Arguments of `llamado` for a gateway before servers at these addresses (`host:port`)."""
        words = ["gateway", *(self.gateway or ())]
        words += [spelled("gateway", "host"), host, spelled("gateway", "port"), str(self.port)]
        return [*words, spelled("gateway", "replica"), ",".join(f"http://{server}" for server in servers), *more]

    def allowed_hosts(self, *names: str) -> dict[str, str]:
        """Environment with the names under which servers and gateways without keys are reached: these and `domain`."""
        found = [*names, *([self.domain] if self.domain != "_" else [])]
        return {variable("serve", "allowed_hosts"): ",".join(found)} if found else {}

    @property
    def server_port(self) -> int:
        """Of the (first) server where all share an address: behind the gateway's, which clients know."""
        return self.port + (self.gateway is not None)

    @property
    def server_tls(self) -> bool:
        """Whether servers are reached by TLS: behind a gateway that is the gateway's."""
        return self.tls and self.gateway is None

    @property
    def mlock(self) -> bool:
        """Whether weights are to be locked in RAM."""
        parsed = self.parsed
        return bool(parsed.mlock) or "mlock" in str(parsed.load_mode)


def spelled(command: str, key: str) -> str:
    """The longest spelling of a flag of a command. Raises KeyError where it has none of that key."""
    return max(_flag(command, key).names, key=len)


def variable(command: str, key: str) -> str:
    """The environment variable of a flag."""
    return _flag(command, key).env[0]


def _flag(command: str, key: str) -> Flag:
    for flag in FLAGS:
        if flag.key == key and command in flag.commands and flag.kind is Kind.USED:
            return flag
    raise KeyError(f"llamado {command} has no flag {key}")


class _Plain(yaml.SafeDumper):
    """Writes everything where it belongs, however often it is the same."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def yaml_text(*documents: Any) -> str:
    """Documents as YAML, in their order."""
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)
