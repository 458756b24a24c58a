"""Deployment: numbers of servers, workers and gateways, their command lines and their secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from llamado.errors import LlamadoError
from llamado.flags import (
    FLAGS,
    Flag,
    FlagParser,
    Kind,
    ParsedFlags,
    add_flags,
    api_prefix,
    parse,
    split_flags,
    split_secrets,
)

_SIZE = re.compile(r"\d+(?:\.\d+)?[KMGT]?")
_MODELS = frozenset({"model", "hf_repo", "model_url", "models_dir", "models_preset", "llama_swap"})
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
_CERTIFICATE = ("ssl_key_file", "ssl_cert_file")
_FILES = (
    *_CERTIFICATE,
    "api_key_file",
    "key_file",
    "gateway_config",
    "mcp_servers_config",
    "rpc_ca",
    "rpc_cert",
    "rpc_key",
)
"""Flags (by their keys) with files of keys, tokens and certificates."""
_CLIENT_KEYS = frozenset({"api_key", "api_key_file", "key_file", "gateway_config"})
"""Flags (by their keys) that make clients need an API key."""


class DeploymentError(LlamadoError):
    """The requested deployment is not possible."""


class SecretText(str):
    """Content of a file that only its owner may read."""


class _Flags(NamedTuple):
    """Flags of a server or gateway: public arguments, secrets by their variables, secret files by the flags' keys."""

    words: tuple[str, ...]
    secrets: Mapping[str, str]
    files: Mapping[str, str]

    @classmethod
    def of(cls, arguments: tuple[str, ...], command: str) -> _Flags:
        """Split arguments. Raises FlagError for invalid ones."""
        _parsed(arguments, command)
        words, secrets = split_secrets(arguments, command)
        words, files = split_flags(words, command, _FILES)
        return cls(tuple(words), secrets, {key: os.path.abspath(paths[-1]) for key, paths in files.items()})


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Servers, their workers and an optional gateway. `serve`: flags of `llamado serve`, as given."""

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
    """Memory limit of a server: 16G."""
    worker_memory: str | None = None
    """Memory limit of a worker; None: the same as a server's."""
    cpus: float | None = None
    tls: bool = False
    """Servers and workers use TLS, with certificates stored by the target."""
    key: bool = False
    """Clients need an API key, stored by the target."""
    domain: str = "_"
    """Host name for clients (nginx)."""
    worker: tuple[str, ...] = ()
    """Flags of `llamado worker` for all workers."""
    gateway: tuple[str, ...] | None = None
    """Flags of the gateway; None: no gateway."""
    leader_worker_set: bool = False
    """Group each server with its own workers by a Kubernetes LeaderWorkerSet, instead of one StatefulSet of workers."""

    def __post_init__(self) -> None:
        """Raise DeploymentError for invalid values."""
        for name, value, least in (("--replicas", self.replicas, 1), ("--workers", self.workers, 0)):
            if not least <= value <= 1000:
                raise DeploymentError(f"{name}: expected {least} to 1000, got {value}")
        for name, port in (("--port", self.port), ("--worker-port", self.worker_port)):
            if not 0 < port < 65536:
                raise DeploymentError(f"{name}: expected 1 to 65535, got {port}")
        for memory in (self.memory, self.worker_memory):
            if memory is not None and not _SIZE.fullmatch(memory):
                raise DeploymentError(f"--memory: expected a size such as 16G or 800M, got {memory!r}")
        if self.cpus is not None and not 0 < self.cpus < 10_000:
            raise DeploymentError(f"--cpus: expected a number above 0, got {self.cpus}")
        if not _NAME.fullmatch(self.name):
            raise DeploymentError(f"--name: expected lower-case letters, digits and dashes, got {self.name!r}")
        for text in (self.image, self.program, self.models, self.domain):
            if not text or any(c.isspace() or c in "\"'`$;{}\\" or ord(c) < 32 for c in text):
                raise DeploymentError(f"{text!r} has characters that are not allowed in these files")

    @property
    def parsed(self) -> ParsedFlags:
        """The parsed flags of `llamado serve`. Raises FlagError."""
        return _parsed(self.serve, "serve")

    @cached_property
    def _given(self) -> Mapping[str, _Flags]:
        """Flags by part: "server" and "gateway". Raises FlagError."""
        given = {"server": _Flags.of(self.serve, "serve")}
        if self.gateway is not None:
            given["gateway"] = _Flags.of(self.gateway, "gateway")
        return given

    # --- keys, certificates, prefix -----------------------------------------------------------------------------------

    @property
    def front(self) -> str:
        """The part that clients connect to: "server" or "gateway"."""
        return "server" if self.gateway is None else "gateway"

    @property
    def prefix(self) -> str:
        """Prefix of all paths of the servers. Raises FlagError."""
        return api_prefix(self.parsed.api_prefix)

    @property
    def https(self) -> bool:
        """True if clients use TLS. Raises DeploymentError."""
        named = {key for given in self._given.values() for key in _CERTIFICATE if key in given.files}
        if len(named) == 1:
            raise DeploymentError("--ssl-key-file and --ssl-cert-file: give both or none")
        return self.tls or bool(named)

    @property
    def server_https(self) -> bool:
        """True if servers use TLS for HTTP. Behind a gateway only the gateway does."""
        return self.https and self.front == "server"

    @property
    def has_key(self) -> bool:
        """True if clients need a key."""
        return self.server_has_key or self._gateway_has_keys

    @property
    def server_has_key(self) -> bool:
        """True if servers require a key."""
        return self.key or bool(self.parsed.given & _CLIENT_KEYS)

    @cached_property
    def _gateway_has_keys(self) -> bool:
        """True if the gateway has its own keys, different from those of the servers."""
        return self.gateway is not None and bool(_parsed(self.gateway, "gateway").given & _CLIENT_KEYS)

    @cached_property
    def first_key(self) -> str:
        """A key that servers accept; "" if this machine has none."""
        given = self._given["server"]
        keys = given.secrets.get("LLAMA_API_KEY", "").split(",")
        lines = (read_secret(given.files.get("api_key_file", "")) or "").splitlines()
        keys += [line for line in lines if not line.startswith("#")]
        return next((key.strip() for key in keys if key.strip()), "")

    def secrets(self, part: str) -> dict[str, str]:
        """Return the environment variables with the secrets of a part. Values that the operator must fill in are ""."""
        if part not in self._given:
            return {}
        found = dict(self._given[part].secrets)
        own_key = variable("serve", "api_key")
        if part == "server":
            if self.key and not self.parsed.given & _CLIENT_KEYS:
                found[own_key] = ""
            return found
        if self.server_has_key:
            if not self._gateway_has_keys and own_key in (servers := self.secrets("server")):
                found[own_key] = servers[own_key]
            found.setdefault(variable("gateway", "replica_key"), self.first_key)
        return found

    def files(self, part: str, *, certificate: bool) -> dict[str, str]:
        """Return the names of the secret files of a part, by the keys of its flags.

        `certificate`: include the TLS certificate for clients and its key. Raises DeploymentError.
        """
        if part not in self._given:
            return {}
        keys = [key for key in self._given[part].files if key not in _CERTIFICATE]
        names = {key: self._file_name(part, key) for key in keys}
        if part == "gateway" and not self._gateway_has_keys and "api_key_file" in self._given["server"].files:
            names["api_key_file"] = "api_key_file"
        if certificate and self.https:
            names |= {key: key for key in _CERTIFICATE}
        return names

    def _file_name(self, part: str, key: str) -> str:
        taken = part == "gateway" and key in self._given["server"].files
        return f"gateway_{key}" if taken else key

    def source(self, name: str) -> str:
        """Return the path of a secret file on this machine; "" if the target provides the file."""
        for part, given in self._given.items():
            for key, path in given.files.items():
                if name == (key if key in _CERTIFICATE else self._file_name(part, key)):
                    return path
        return ""

    # --- commands -----------------------------------------------------------------------------------------------------

    def serve_command(self, *more: str, rpc: Sequence[str] = (), host: str | None = None) -> list[str]:
        """Return the arguments of `llamado` for a server: the given flags without secrets, address, workers, metrics.

        Raises FlagError for unknown flags, and DeploymentError.
        """
        given = self.parsed.given
        api_prefix(self.parsed.api_prefix)
        ours = [key for key in ("host", "port") if key in given]
        if ours:
            name, port = flag_name("serve", ours[0]), flag_name("serve", "port")
            raise DeploymentError(f"{name}: the deployment sets the address; give {port} before --")
        if not given & _MODELS:
            raise DeploymentError("no model given: llamado deploy TARGET -- -m MODEL")
        if rpc and "rpc" in given:
            name = flag_name("serve", "rpc")
            raise DeploymentError(f"{name} and --workers: use existing workers or deploy new ones, not both")
        words = ["serve", *self._given["server"].words]
        if "metrics" not in given:
            words.append(flag_name("serve", "metrics"))
        for key, value in (("host", host), ("port", str(self.port))):
            if value is not None:
                words += [flag_name("serve", key), value]
        if rpc:
            words += [flag_name("serve", "rpc"), ",".join(rpc)]
        return [*words, *more]

    def worker_command(self, *more: str, host: str) -> list[str]:
        """Return the arguments of `llamado` for a worker that caches received weights on disk."""
        address = [flag_name("worker", "host"), host, flag_name("worker", "port"), str(self.worker_port)]
        return ["worker", *address, flag_name("worker", "cache"), *self.worker, *more]

    def gateway_command(self, *more: str, servers: Sequence[str], host: str) -> list[str]:
        """Return the arguments of `llamado` for a gateway with servers at these addresses (`host:port`)."""
        words = ["gateway", *self._given["gateway"].words]
        words += [flag_name("gateway", "host"), host, flag_name("gateway", "port"), str(self.port)]
        urls = ",".join(f"http://{server}{self.prefix}" for server in servers)
        return [*words, flag_name("gateway", "replica"), urls, *more]

    def allowed_hosts(self, *names: str) -> dict[str, str]:
        """Return the environment with the allowed host names of servers and gateways: these and `domain`."""
        found = [*names, *([self.domain] if self.domain != "_" else [])]
        return {variable("serve", "allowed_hosts"): ",".join(found)} if found else {}

    def written_folders(self, part: str) -> list[str]:
        """Return the folders that a part writes to, according to its flags."""
        if part == "worker" or (part == "gateway" and self.gateway is None):
            return []
        flags = self.parsed if part == "server" else _parsed(self.gateway or (), "gateway")
        found = [flags.values.get(key) for key in ("slot_save_path", "cache_disk", "chats")]
        found += [os.path.dirname(os.path.abspath(path)) for key in ("log_file", "quota_file")
                  if (path := flags.values.get(key))]  # fmt: skip
        if "tools_folder" in flags.given:
            found.append(flags.tools_folder)
        return sorted({os.path.abspath(folder) for folder in found if folder})

    @property
    def server_port(self) -> int:
        """Port of the first server if all share one address. A gateway has `port`, and servers the ports after it."""
        return self.port + (self.gateway is not None)

    def memory_limit(self, part: str) -> str | None:
        """Return the memory limit of a part; None without one. A gateway holds no model and has none."""
        return {"server": self.memory, "worker": self.worker_memory or self.memory}.get(part)

    @property
    def mlock(self) -> bool:
        """True if weights are locked in RAM."""
        parsed = self.parsed
        return bool(parsed.mlock) or "mlock" in str(parsed.load_mode)


@lru_cache(maxsize=16)
def _parsed(arguments: tuple[str, ...], command: str) -> ParsedFlags:
    parser = FlagParser(prog=f"llamado {command}", allow_abbrev=False)
    add_flags(parser, command)
    return parse(parser, command, list(arguments), {})[0]


def read_secret(path: str) -> str | None:
    """Return the content of a secret file, None if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8") if path else None
    except (OSError, UnicodeDecodeError):
        return None


def environment_file(name: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return a file of environment variables for systemd and compose, by its name; {} without variables.

    If the operator has to fill in values, its name ends with `.example`: a server does not start with an empty key.
    """
    if not variables:
        return {}
    text = "".join(f"{variable}={_quoted(value)}\n" for variable, value in variables.items())
    return {name if all(variables.values()) else f"{name}.example": SecretText(text)}


def _quoted(value: str) -> str:
    if re.fullmatch(r"[\w.,:/@%+=-]*", value, re.ASCII):
        return value
    if "'" not in value:
        return f"'{value}'"
    return '"' + re.sub(r'([\\"$`])', r"\\\1", value) + '"'


def flag_name(command: str, key: str) -> str:
    """Return the longest spelling of a command's flag. Raises KeyError for an unknown key."""
    return max(_flag(command, key).names, key=len)


def path_flags(part: str, paths: Mapping[str, str]) -> list[str]:
    """Return the flags of a part with these paths, which are given by the flags' keys."""
    command = "serve" if part == "server" else part
    return [word for key, path in paths.items() for word in (flag_name(command, key), path)]


def variable(command: str, key: str) -> str:
    """Return the environment variable of a flag."""
    return _flag(command, key).env[0]


def _flag(command: str, key: str) -> Flag:
    for flag in FLAGS:
        if flag.key == key and command in flag.commands and flag.kind is Kind.USED:
            return flag
    raise KeyError(f"llamado {command} has no flag {key}")


class _PlainDumper(yaml.SafeDumper):
    """Dumper without aliases: repeated values are written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def yaml_text(*documents: Any) -> str:
    """Return documents as YAML, with keys in their given order."""
    return yaml.dump_all(documents, Dumper=_PlainDumper, sort_keys=False, width=120, allow_unicode=True)
