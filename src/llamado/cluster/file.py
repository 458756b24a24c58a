"""`cluster.yaml`, the file of `llamado up`: one tree of dataclasses that defines the format and the JSON schema.

`python -m llamado.cluster.file > docs/cluster.schema.json` regenerates the schema.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from llamado.errors import LlamadoError

Option = str | int | float | bool | tuple[str | int | float, ...]
"""Value of a server flag."""


class ClusterFileError(LlamadoError):
    """A cluster.yaml, or flags that replace it, that cannot be used."""


def _entry(description: str, default: Any, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A key of the file: its default, its description, and the smallest and largest number allowed."""
    return dataclasses.field(default=default, metadata={"about": description, "least": minimum, "most": maximum})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """A tap in front of a worker that slows down its link."""

    latency: float = _entry("delay of each graph, ms", 0.0, 0, 1e6)
    jitter: float = _entry("random extra delay of up to this much, ms", 0.0, 0, 1e6)
    bandwidth: str | None = _entry("maximum bits per second in each direction: 1G, 100M, 64k", None)
    all: bool = _entry("delay every command, not only graphs", False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """A worker: a local one is started; one on another machine must already run."""

    host: str = _entry("address; a local address (127.0.0.1) starts the worker on this machine", "127.0.0.1")
    port: int = _entry("port (0: any free port)", 0, 0, 65535)
    threads: int | None = _entry("threads (default: an equal share of this machine's cores)", None, 1)
    mem: str | int | None = _entry("maximum memory it offers: MiB, or 512K, 800M, 16G", None)
    device: str | None = _entry("devices it offers, comma-separated (default: CPU)", None)
    models_dir: str | None = _entry(
        "folders with models on its machine, comma-separated; weights found there are mapped, not sent", None
    )
    node: str | None = _entry("on Ray: required node, by address or Ray id (default: any)", None)
    link: LinkConfig | None = _entry("a tap in front of it", None)  # noqa: RUF009

    @property
    def is_local(self) -> bool:
        """True if the worker is on this machine, where `llamado up` starts it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """Restarts of processes that end unexpectedly."""

    first: float = _entry("seconds before the first restart; the pause doubles each time", 0.5, 0.01)
    longest: float = _entry("maximum seconds between two starts", 30.0, 0.01)
    settled: float = _entry("seconds of being ready after which the pause and the crash count start over", 60.0, 0)
    crashes: int = _entry("number of ends in a row that are reported as a crash loop", 5, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """Resources that each server or each worker reserves on a Ray node."""

    cpus: int = _entry("processors, also its number of threads (a worker's threads take precedence)", 1, 1, 4096)
    memory: str | int | None = _entry("memory: MiB, or 512K, 800M, 16G (a worker's mem takes precedence)", None)
    node: str | None = _entry("required node, by address or Ray id (default: spread over all nodes)", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Placement of servers and workers by Ray, with `on: ray`."""

    address: str = _entry("Ray's head: auto (this machine's), host:port, or local (starts one)", "auto")
    server: ActorConfig = _entry("resources of each server", ActorConfig())  # noqa: RUF009
    worker: ActorConfig = _entry("resources of each worker", ActorConfig())  # noqa: RUF009
    wait: float = _entry("seconds to wait for free resources before llamado up gives up", 60.0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster: everything that `llamado up` starts and waits for."""

    name: str = _entry("name for llamado ps, down, logs and drain", "default")
    model: str = _entry("a GGUF path, a name (smollm2, gemma3), hf:user/repo[:quant], ollama:name[:tag]", "smollm2")
    engine: Literal["llamado", "llama.cpp"] = _entry(
        "programs to run: llamado's, or llama-server and ggml-rpc-server from PATH", "llamado"
    )
    on: Literal["here", "ray"] = _entry("run servers and workers on this machine, or let Ray place them", "here")
    ray: RayConfig = _entry("settings for on: ray", RayConfig())  # noqa: RUF009
    host: str = _entry("address to listen on for requests", "127.0.0.1")
    port: int = _entry("port to listen on for requests (0: any free port)", 8080, 0, 65535)
    workers: int | tuple[WorkerConfig, ...] = _entry("workers that share the model: a number or a list", 0, 0, 64)
    server: Mapping[str, Option] = dataclasses.field(
        default_factory=dict,
        metadata={"about": "flags of llama-server by their long names: {ctx-size: 4096}", "least": None, "most": None},
    )
    replicas: int = _entry("number of servers, each with its own workers; several get a gateway", 1, 1, 64)
    gateway: Mapping[str, Option] = dataclasses.field(
        default_factory=dict,
        metadata={"about": "flags of llamado gateway by their long names: {patience: 20}", "least": None, "most": None},
    )
    log_folder: str | None = _entry("folder for logs (default: in the cluster's state folder)", None)
    restart: RestartConfig = _entry("restarts of processes that end unexpectedly", RestartConfig())  # noqa: RUF009
    stop_timeout: float = _entry("seconds between SIGTERM and SIGKILL", 15.0, 0.1)

    @property
    def worker_list(self) -> tuple[WorkerConfig, ...]:
        """The workers as a list, even if only their number is given."""
        return (WorkerConfig(),) * self.workers if isinstance(self.workers, int) else self.workers

    @property
    def has_gateway(self) -> bool:
        """True if clients reach the servers through a gateway."""
        return self.replicas > 1 or bool(self.gateway) or self.on == "ray"


# Server flags that have a key of their own in the file.
DEDICATED_KEYS = {
    "model": "model",
    "hf-repo": "model",
    "model-url": "model",
    "host": "host",
    "port": "port",
    "rpc": "workers",
}


def read_cluster(path: Path) -> ClusterConfig:
    """Read a cluster.yaml. Raises ClusterFileError."""
    try:
        root = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ClusterFileError(f"{path}: {reason}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ClusterFileError(f"{path}: invalid YAML: {error}") from None
    return parse_cluster(root, str(path))


def parse_cluster(root: object, source: str) -> ClusterConfig:
    """Return the cluster that parsed YAML describes. Error messages begin with `source`. Raises ClusterFileError."""
    try:
        config: ClusterConfig = _read(ClusterConfig, {} if root is None else root, "")
    except _InvalidValue as wrong:
        where, message = wrong.args
        raise ClusterFileError(f"{source}: {where + ': ' if where else ''}{message}") from None
    if not config.name or any(not (c.isalnum() or c in "._-") for c in config.name) or config.name[0] in ".-":
        raise ClusterFileError(f"{source}: name: expected letters, digits, '.', '_', '-', got {config.name!r}")
    for name in config.gateway:
        if name in ("host", "port", "replica", "config"):
            raise ClusterFileError(f"{source}: gateway.{name}: set by other keys of the file; leave it out")
    for name in config.server:
        if name in ("ssl-key-file", "ssl-cert-file") and config.has_gateway:
            raise ClusterFileError(f"{source}: server.{name}: clients connect to the gateway; use gateway.{name}")
        if name in DEDICATED_KEYS:
            raise ClusterFileError(f"{source}: server.{name}: use the key {DEDICATED_KEYS[name]!r} of the file")
    for number, worker in enumerate(config.worker_list, 1):
        if not worker.is_local and (
            worker.port == 0 or worker.threads or worker.mem or worker.device or worker.models_dir
        ):
            raise ClusterFileError(
                f"{source}: workers[{number}]: {worker.host} is another machine, where llamado up starts nothing: give "
                "its port, and set threads, mem, device and models_dir when you start the worker there"
            )
    if config.on == "ray":
        _check_on_ray(config, source)
    return config


def _check_on_ray(config: ClusterConfig, source: str) -> None:
    """Raise ClusterFileError for settings that Ray does not support."""
    if config.engine != "llamado":
        raise ClusterFileError(f"{source}: engine: Ray runs llamado's own programs; leave out engine, or on: ray")
    for number, worker in enumerate(config.worker_list, 1):
        if worker.link is not None:
            raise ClusterFileError(f"{source}: workers[{number}].link: slow links work on one machine, not on Ray")
        if worker.is_local and worker.port:
            raise ClusterFileError(f"{source}: workers[{number}].port: Ray's node picks a free port; leave it out")
        if not worker.is_local and worker.node:
            raise ClusterFileError(
                f"{source}: workers[{number}].node: {worker.host} runs outside Ray already; leave node out"
            )


class _InvalidValue(Exception):
    """A wrong value: its place in the file (`workers[1].port`), and the reason."""


def _read(type_: Any, value: Any, where: str) -> Any:
    """Convert a value of the file to a type of the dataclasses. Raises _InvalidValue."""
    if dataclasses.is_dataclass(type_):
        return _read_keys(typing.cast(type, type_), value, where)
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if origin in (types.UnionType, typing.Union):
        fitting = [kind for kind in arguments if _fits(kind, value)]
        if fitting:
            return _read(fitting[0], value, where)
    elif origin is tuple and isinstance(value, list):
        return tuple(_read(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(value, 1))
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        items = {str(name): _read(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
        return {name.replace("_", "-"): item for name, item in items.items()}
    elif _fits(type_, value):
        return float(value) if type_ is float else value
    raise _InvalidValue(where, f"expected {_type_name(type_)}, got {value!r:.60}")


def _fits(type_: Any, value: Any) -> bool:
    """Return True if a value has the outer type `type_`; its items are not checked."""
    origin = typing.get_origin(type_)
    if type_ is type(None):
        return value is None
    if dataclasses.is_dataclass(type_) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return isinstance(value, dict)
    if origin is tuple:
        return isinstance(value, list)
    if origin is Literal:
        return value in typing.get_args(type_)
    if type_ is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == value
    return isinstance(value, type_) and (type_ is bool or not isinstance(value, bool))


def _read_keys(type_: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _InvalidValue(where, f"expected keys and values, got {value!r:.60}")
    fields = {field.name: field for field in dataclasses.fields(type_)}
    hints = typing.get_type_hints(type_)
    found: dict[str, Any] = {}
    for key, item in value.items():
        if key is True:
            key = "on"  # YAML 1.1 reads it as true
        inside = f"{where}.{key}" if where else str(key)
        name = str(key).replace("-", "_")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(fields)}"
            raise _InvalidValue(inside, f"unknown key; {hint}")
        found[name] = _read(hints[name], item, inside)
        minimum, maximum = fields[name].metadata["least"], fields[name].metadata["most"]
        number = found[name] if isinstance(found[name], int | float) else None
        if (
            number is not None
            and minimum is not None
            and not minimum <= number <= (math.inf if maximum is None else maximum)
        ):
            limits = f"{minimum:g} or more" if maximum is None else f"{minimum:g} to {maximum:g}"
            raise _InvalidValue(inside, f"expected {limits}, got {item!r}")
    return type_(**found)


def _type_name(type_: Any) -> str:
    """Return a type in words, for messages."""
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(_type_name(kind) for kind in arguments if kind is not type(None)))
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return "a list"
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    return names.get(type_, "keys and values")


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of cluster.yaml."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "cluster.yaml of llamado up"}
    return head | _schema(ClusterConfig)


def _schema(type_: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(type_):
        hints = typing.get_type_hints(type_)
        keys = {field.name: _schema_of_key(field, hints[field.name]) for field in dataclasses.fields(type_)}
        description = (type_.__doc__ or "").strip()
        return {"description": description, "type": "object", "additionalProperties": False, "properties": keys}
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_schema(kind) for kind in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0])}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    names = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
    return {"type": names[type_]}


def _schema_of_key(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    found = _schema(hint)
    limits = {"minimum": field.metadata["least"], "maximum": field.metadata["most"]}
    for kind in found.get("anyOf", [found]):
        if kind.get("type") in ("integer", "number"):
            kind.update({name: limit for name, limit in limits.items() if limit is not None})
    found["description"] = field.metadata["about"]
    if field.default is not dataclasses.MISSING and not dataclasses.is_dataclass(field.default):
        found["default"] = field.default
    return found


if __name__ == "__main__":
    json.dump(schema(), sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")
