"""`cluster.yaml`: what `llamado up` starts. One tree of dataclasses, from which the JSON schema is made, too.

`python -m llamado.cluster.file > docs/cluster.schema.json` writes the schema anew.
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
"""A value of one of the server's flags."""


class ClusterFileError(LlamadoError):
    """A cluster.yaml, or flags in its place, that cannot be used."""


def _entry(about: str, default: Any, least: float | None = None, most: float | None = None) -> Any:
    """A key of the file: what it means, its default, and the least and the most it may be."""
    return dataclasses.field(default=default, metadata={"about": about, "least": least, "most": most})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """A tap before a worker that makes its link slower."""

    latency: float = _entry("delay of each graph, ms", 0.0, 0, 1e6)
    jitter: float = _entry("random part of the delay: up to this much more, ms", 0.0, 0, 1e6)
    bandwidth: str | None = _entry("most bits a second each way: 1G, 100M, 64k", None)
    all: bool = _entry("delay every command, not only graphs", False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """A worker: one that is started here, or, with the address of another machine, one that is waited for."""

    host: str = _entry("its address; one of this machine (127.0.0.1): it is started", "127.0.0.1")
    port: int = _entry("its port (0: any free one)", 0, 0, 65535)
    threads: int | None = _entry("its threads (default: this machine's cores, divided)", None, 1)
    mem: str | int | None = _entry("most memory that it lends: MiB, or 512K, 800M, 16G", None)
    device: str | None = _entry("devices that it offers, comma-separated (default: CPU)", None)
    models_dir: str | None = _entry("folders with models on its machine, comma-separated: it maps what is there", None)
    node: str | None = _entry("on Ray: the node it must be on, by its address or Ray's id (default: any)", None)
    link: LinkConfig | None = _entry("a tap before it", None)  # noqa: RUF009

    @property
    def here(self) -> bool:
        """Whether it is on this machine, so that it is started."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """What is done when a process ends that should not."""

    first: float = _entry("seconds before it is started again; they double each time", 0.5, 0.01)
    longest: float = _entry("the most seconds between two starts", 30.0, 0.01)
    settled: float = _entry("seconds after which one that was ready is no longer taken for crashing", 60.0, 0)
    crashes: int = _entry("so many ends in a row are called a crash loop", 5, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """What each server, or each worker, reserves of Ray's nodes."""

    cpus: int = _entry("processors, which are its threads (a worker's own threads come first)", 1, 1, 4096)
    memory: str | int | None = _entry("memory: MiB, or 512K, 800M, 16G (a worker's own mem comes first)", None)
    node: str | None = _entry("the node it must be on, by its address or Ray's id (default: spread over all)", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Where servers and workers are placed, with `on: ray`."""

    address: str = _entry("Ray's head: auto (that of this machine), host:port, or local (started for this)", "auto")
    server: ActorConfig = _entry("what each server reserves", ActorConfig())  # noqa: RUF009
    worker: ActorConfig = _entry("what each worker reserves", ActorConfig())  # noqa: RUF009
    wait: float = _entry("seconds for which Ray may look for room before llamado up gives up", 60.0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """All that `llamado up` starts and waits for."""

    name: str = _entry("how ps, down, logs and drain know it", "default")
    model: str = _entry("a GGUF path, a name (smollm2, gemma3), hf:user/repo[:quant], ollama:name[:tag]", "smollm2")
    engine: Literal["llamado", "llama.cpp"] = _entry(
        "whose programs: llamado's, or llama-server and ggml-rpc-server from PATH", "llamado"
    )
    on: Literal["here", "ray"] = _entry("where servers and workers run: on this machine, or where Ray has room", "here")
    ray: RayConfig = _entry("what Ray is told, with on: ray", RayConfig())  # noqa: RUF009
    host: str = _entry("address on which requests are answered", "127.0.0.1")
    port: int = _entry("port on which requests are answered (0: any free one)", 8080, 0, 65535)
    workers: int | tuple[WorkerConfig, ...] = _entry("how many workers share the model, or which", 0, 0, 64)
    server: Mapping[str, Option] = dataclasses.field(
        default_factory=dict,
        metadata={"about": "flags of llama-server by their long names: {ctx-size: 4096}", "least": None, "most": None},
    )
    replicas: int = _entry("how many servers, each with workers of its own; a gateway stands before several", 1, 1, 64)
    gateway: Mapping[str, Option] = dataclasses.field(
        default_factory=dict,
        metadata={"about": "flags of llamado gateway by their long names: {patience: 20}", "least": None, "most": None},
    )
    log_folder: str | None = _entry("folder of the logs (default: in the folder of the state)", None)
    restart: RestartConfig = _entry("what is done when a process ends", RestartConfig())  # noqa: RUF009
    stop_timeout: float = _entry("seconds that a process gets between SIGTERM and SIGKILL", 15.0, 0.1)

    @property
    def worker_list(self) -> tuple[WorkerConfig, ...]:
        """The workers, also where only their number was given."""
        return (WorkerConfig(),) * self.workers if isinstance(self.workers, int) else self.workers

    @property
    def has_gateway(self) -> bool:
        """Whether a gateway stands before the servers."""
        return self.replicas > 1 or bool(self.gateway) or self.on == "ray"


# Names of the server that other keys of the file say.
ELSEWHERE = {
    "model": "model",
    "hf-repo": "model",
    "model-url": "model",
    "host": "host",
    "port": "port",
    "rpc": "workers",
}


def read_cluster(path: Path) -> ClusterConfig:
    """The cluster that a file describes. Raises ClusterFileError."""
    try:
        root = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ClusterFileError(f"{path}: {reason}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ClusterFileError(f"{path}: no YAML: {error}") from None
    return cluster_of(root, str(path))


def cluster_of(root: object, source: str) -> ClusterConfig:
    """The cluster that keys and values describe; `source` begins messages. Raises ClusterFileError."""
    try:
        config: ClusterConfig = _read(ClusterConfig, {} if root is None else root, "")
    except _Wrong as wrong:
        where, message = wrong.args
        raise ClusterFileError(f"{source}: {where + ': ' if where else ''}{message}") from None
    if not config.name or any(not (c.isalnum() or c in "._-") for c in config.name) or config.name[0] in ".-":
        raise ClusterFileError(f"{source}: name: expected letters, digits, '.', '_', '-', got {config.name!r}")
    for name in config.gateway:
        if name in ("host", "port", "replica", "config"):
            raise ClusterFileError(f"{source}: gateway.{name}: the other keys of the file say this")
    for name in config.server:
        if name in ("ssl-key-file", "ssl-cert-file") and config.has_gateway:
            raise ClusterFileError(f"{source}: server.{name}: requests come to the gateway: gateway.{name} says this")
        if name in ELSEWHERE:
            raise ClusterFileError(f"{source}: server.{name}: the key {ELSEWHERE[name]!r} of the file says this")
    for number, worker in enumerate(config.worker_list, 1):
        if not worker.here and (worker.port == 0 or worker.threads or worker.mem or worker.device or worker.models_dir):
            raise ClusterFileError(
                f"{source}: workers[{number}]: {worker.host} is another machine, where nothing is started: it needs a "
                "port, and has its own threads, mem, device and models_dir"
            )
    if config.on == "ray":
        _check_on_ray(config, source)
    return config


def _check_on_ray(config: ClusterConfig, source: str) -> None:
    """Raises ClusterFileError for what does not go with Ray."""
    if config.engine != "llamado":
        raise ClusterFileError(f"{source}: engine: on Ray llamado's own programs run; leave out engine, or on: ray")
    for number, worker in enumerate(config.worker_list, 1):
        if worker.link is not None:
            raise ClusterFileError(f"{source}: workers[{number}].link: slow links are made on one machine, not on Ray")
        if worker.here and worker.port:
            raise ClusterFileError(f"{source}: workers[{number}].port: a free one is taken on its node; leave it out")
        if not worker.here and worker.node:
            raise ClusterFileError(f"{source}: workers[{number}].node: {worker.host} is there already; leave node out")


class _Wrong(Exception):
    """Where in the file, and what is wrong."""


def _read(type_: Any, value: Any, where: str) -> Any:
    """A value of the file as a type of the dataclasses. Raises _Wrong."""
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
    raise _Wrong(where, f"expected {_words(type_)}, got {value!r:.60}")


def _fits(type_: Any, value: Any) -> bool:
    """Whether a value is of the kind of a type, whatever is in it."""
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
        raise _Wrong(where, f"expected keys and values, got {value!r:.60}")
    known = {field.name: field for field in dataclasses.fields(type_)}
    hints = typing.get_type_hints(type_)
    found: dict[str, Any] = {}
    for key, item in value.items():
        if key is True:
            key = "on"  # which YAML 1.1 reads as true
        inside = f"{where}.{key}" if where else str(key)
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise _Wrong(inside, f"there is no such key; {hint}")
        found[name] = _read(hints[name], item, inside)
        least, most = known[name].metadata["least"], known[name].metadata["most"]
        number = found[name] if isinstance(found[name], int | float) else None
        if number is not None and least is not None and not least <= number <= (math.inf if most is None else most):
            limits = f"{least:g} or more" if most is None else f"{least:g} to {most:g}"
            raise _Wrong(inside, f"expected {limits}, got {item!r}")
    return type_(**found)


def _words(type_: Any) -> str:
    """A type in words, for messages."""
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(_words(kind) for kind in arguments if kind is not type(None)))
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return "a list"
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(type_, "keys and values")


def schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of cluster.yaml."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "cluster.yaml of llamado up"}
    return head | _schema(ClusterConfig)


def _schema(type_: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(type_):
        hints = typing.get_type_hints(type_)
        keys = {field.name: _schema_of_key(field, hints[field.name]) for field in dataclasses.fields(type_)}
        about = (type_.__doc__ or "").strip()
        return {"description": about, "type": "object", "additionalProperties": False, "properties": keys}
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
