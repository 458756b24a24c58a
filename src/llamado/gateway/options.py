"""Gateway options: replicas, keys and their limits, from flags and a file (`gateway.yaml`)."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from llamado.errors import LlamadoError
from llamado.http.access import AccessRules


class GatewayError(LlamadoError):
    """A gateway's options are invalid."""


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """One server behind the gateway."""

    url: str
    name: str = ""
    """Its name in metrics and responses; "": host and port of its URL."""
    key: str = field(default="", repr=False)
    """API key to send to it."""
    weight: float = 1.0
    """Its capacity relative to other replicas."""
    backup: bool = False
    """True if it gets requests only while no other replica is available."""

    def __post_init__(self) -> None:
        if "://" not in self.url:
            object.__setattr__(self, "url", f"http://{self.url}")
        try:
            parts = urlsplit(self.url)
            right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            right = False
        if not right:
            raise GatewayError(f"{self.url!r} is not a replica's address: expected http://host:port")
        if not 0 < self.weight < float("inf"):
            raise GatewayError(f"replica {self.url}: weight: expected a number above 0, got {self.weight}")
        if not self.name:
            object.__setattr__(self, "name", parts.netloc.rpartition("@")[2])
        object.__setattr__(self, "url", self.url.rstrip("/"))


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """A client's key and its limits; None: no limit."""

    name: str
    key: str = field(repr=False)
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    requests_per_day: float | None = None
    tokens_per_day: float | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.key:
            raise GatewayError(f"key {self.name!r}: expected a name and a key")
        for limit in ("requests_per_minute", "tokens_per_minute", "requests_per_day", "tokens_per_day"):
            value = getattr(self, limit)
            if value is not None and value <= 0:
                raise GatewayError(f"key {self.name!r}: {limit}: expected more than 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """All options of a gateway. Times in seconds."""

    replicas: tuple[ReplicaOptions, ...] = ()
    keys: tuple[KeyOptions, ...] = ()
    quota_file: Path | None = None
    """File for today's usage of keys; None: a restart forgets the usage."""
    admin_key: str = field(default="", repr=False)
    """Key for `/gateway/…`; "": administration is disabled."""
    access: AccessRules = field(default_factory=AccessRules)
    labels: Mapping[str, str] = field(default_factory=dict)
    """Additional labels of all metrics."""
    health_interval: float = 1.0
    """Time between two checks of a replica's `/health`."""
    health_timeout: float = 5.0
    """Time for a response of `/health`. A replica that exceeds it counts as frozen."""
    stall_timeout: float = 120.0
    """Time for a frozen replica to continue responses that it has started."""
    patience: float = 10.0
    """Time a request waits for an available replica."""
    ssl_key: str | None = None
    ssl_cert: str | None = None
    timeout: int = 3600
    """Time a connection may be idle in the middle of a request or a response."""

    def __post_init__(self) -> None:
        for what, names in (("replica", self.replicas), ("key", self.keys)):
            seen: set[str] = set()
            for named in names:
                if named.name in seen:
                    raise GatewayError(f"two {what}s have the name {named.name!r}; rename one of them")
                seen.add(named.name)
        if len({key.key for key in self.keys}) < len(self.keys):
            raise GatewayError("two of the keys are the same")
        if self.quota_file is not None and not self.keys:
            raise GatewayError("quota_file: there are no keys whose usage it could hold: give keys, or leave it out")
        for name in ("health_interval", "health_timeout", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise GatewayError(f"{name}: expected seconds, more than 0, got {getattr(self, name)}")


def _check_fields(kind: type, given: Any, where: str) -> dict[str, Any]:
    """Check a file's object against a class's fields. Raises GatewayError for unknown names and wrong types."""
    if not isinstance(given, dict):
        raise GatewayError(f"{where}: expected names and values, got {given!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name, value in given.items():
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            raise GatewayError(f"{where}: unknown {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        annotation = str(fields[name].type)
        right: tuple[type, ...] = (int, float) if "float" in annotation else (bool,) if annotation == "bool" else (str,)
        if (value is None and "None" in annotation) or (
            isinstance(value, right) and isinstance(value, bool) == (bool in right)
        ):
            continue
        raise GatewayError(f"{where}: {name}: expected {' or '.join(t.__name__ for t in right)}, got {value!r}")
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in given]
    if missing:
        raise GatewayError(f"{where}: {missing[0]!r} is missing")
    return given


def replica_options(given: Any, where: str, **more: Any) -> ReplicaOptions:
    """Return a replica given as a URL or an object, in a file or a request. Raises GatewayError."""
    if isinstance(given, str):
        given = {"url": given}
    return ReplicaOptions(**{**_check_fields(ReplicaOptions, given, where), **more})


def read_keys(path: str) -> tuple[KeyOptions, ...]:
    """Read keys from a file: a list, or an object with `keys`. Raises GatewayError."""
    config = _read(path)
    listed = config.get("keys") if isinstance(config, dict) else config
    return tuple(_keys(listed, path))


def _keys(listed: Any, path: str) -> Sequence[KeyOptions]:
    if not isinstance(listed, list):
        raise GatewayError(f"{path}: keys: expected a list")
    return [KeyOptions(**_check_fields(KeyOptions, key, f"{path}: keys[{i}]")) for i, key in enumerate(listed)]


_NUMBERS = ("health_interval", "health_timeout", "stall_timeout", "patience")
_LISTS = ("replicas", "backups", "keys")
_TEXTS = ("admin_key", "quota_file")


def read_config(path: str) -> dict[str, Any]:
    """Read a `gateway.yaml` as fields of GatewayOptions. Raises GatewayError."""
    config = _read(path)
    if not isinstance(config, dict):
        raise GatewayError(f"{path}: expected names and values")
    known = (*_LISTS, *_NUMBERS, *_TEXTS, "labels")
    for name in config:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise GatewayError(f"{path}: unknown {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    for name in _LISTS:
        if not isinstance(config.get(name, []), list):
            raise GatewayError(f"{path}: {name}: expected a list")
    given: dict[str, Any] = {
        "replicas": (
            *(replica_options(r, f"{path}: replicas[{i}]") for i, r in enumerate(config.get("replicas", []))),
            *(
                replica_options(r, f"{path}: backups[{i}]", backup=True)
                for i, r in enumerate(config.get("backups", []))
            ),
        ),
        "keys": tuple(_keys(config.get("keys", []), path)),
    }
    for name in _NUMBERS:
        if name in config:
            if not isinstance(config[name], (int, float)) or isinstance(config[name], bool):
                raise GatewayError(f"{path}: {name}: expected a number, got {config[name]!r}")
            given[name] = float(config[name])
    for name in _TEXTS:
        if not isinstance(config.get(name, ""), str):
            raise GatewayError(f"{path}: {name}: expected a text, got {config[name]!r}")
    if config.get("quota_file"):
        given["quota_file"] = Path(config["quota_file"])
    given["admin_key"] = config.get("admin_key", "")
    labels = config.get("labels", {})
    if not isinstance(labels, dict) or not all(isinstance(x, str) for x in (*labels, *labels.values())):
        raise GatewayError(f"{path}: labels: expected names and texts")
    given["labels"] = labels
    return given


def _read(path: str) -> Any:
    try:
        return yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise GatewayError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise GatewayError(f"{path}: invalid YAML: {' '.join(str(error).split())}") from None
