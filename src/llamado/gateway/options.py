"""What a gateway is told: its replicas, its keys and their limits; from flags and from a file (`gateway.yaml`)."""

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
    """What a gateway is told cannot be meant."""


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """One server behind the gateway."""

    url: str
    name: str = ""
    """What it is called in metrics and answers; "": host and port of its URL."""
    key: str = field(default="", repr=False)
    """The API key it asks for."""
    weight: float = 1.0
    """How much it takes compared with the others."""
    backup: bool = False
    """Whether it is used only while no other is up."""

    def __post_init__(self) -> None:
        if "://" not in self.url:
            object.__setattr__(self, "url", f"http://{self.url}")
        try:
            parts = urlsplit(self.url)
            right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            right = False
        if not right:
            raise GatewayError(f"{self.url!r} is no address of a replica: expected http://host:port")
        if not 0 < self.weight < float("inf"):
            raise GatewayError(f"replica {self.url}: weight: expected a number above 0, got {self.weight}")
        if not self.name:
            object.__setattr__(self, "name", parts.netloc.rpartition("@")[2])
        object.__setattr__(self, "url", self.url.rstrip("/"))


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """One client's key and what it may use; None: as much as it likes."""

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
    """Everything a gateway needs. Times in seconds."""

    replicas: tuple[ReplicaOptions, ...] = ()
    keys: tuple[KeyOptions, ...] = ()
    quota_file: Path | None = None
    """Where it is kept what keys have used of their day; None: nowhere, and a restart forgets it."""
    admin_key: str = field(default="", repr=False)
    """What `/gateway/…` asks for; "": nobody may."""
    access: AccessRules = field(default_factory=AccessRules)
    labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels of all metrics."""
    health_interval: float = 1.0
    """From one look at a replica's `/health` to the next."""
    health_timeout: float = 5.0
    """For an answer of `/health`: a replica that takes longer is taken for frozen."""
    stall_timeout: float = 120.0
    """For which a frozen replica may keep answers that it has begun."""
    patience: float = 10.0
    """For which a request waits while there is no replica to send it to."""
    ssl_key: str | None = None
    ssl_cert: str | None = None
    timeout: int = 3600
    """A connection may rest in the middle of a request or an answer."""

    def __post_init__(self) -> None:
        for what, names in (("replica", self.replicas), ("key", self.keys)):
            seen: set[str] = set()
            for named in names:
                if named.name in seen:
                    raise GatewayError(f"two of the {what}s are called {named.name!r}; give one of them another name")
                seen.add(named.name)
        if len({key.key for key in self.keys}) < len(self.keys):
            raise GatewayError("two of the keys are the same")
        if self.quota_file is not None and not self.keys:
            raise GatewayError("quota_file: there are no keys that could use anything: give keys, or leave it out")
        for name in ("health_interval", "health_timeout", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise GatewayError(f"{name}: expected seconds, more than 0, got {getattr(self, name)}")


def _checked(kind: type, given: Any, where: str) -> dict[str, Any]:
    """An object of a file as a class's fields. Raises GatewayError for what is unknown or of the wrong type."""
    if not isinstance(given, dict):
        raise GatewayError(f"{where}: expected names and values, got {given!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name, value in given.items():
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            raise GatewayError(f"{where}: unknown {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        wanted = str(fields[name].type)
        right: tuple[type, ...] = (int, float) if "float" in wanted else (bool,) if wanted == "bool" else (str,)
        if (value is None and "None" in wanted) or (
            isinstance(value, right) and isinstance(value, bool) == (bool in right)
        ):
            continue
        raise GatewayError(f"{where}: {name}: expected {' or '.join(t.__name__ for t in right)}, got {value!r}")
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in given]
    if missing:
        raise GatewayError(f"{where}: {missing[0]!r} is missing")
    return given


def replica_options(given: Any, where: str, **more: Any) -> ReplicaOptions:
    """A replica of a file or a body: a URL, or an object with one. Raises GatewayError."""
    if isinstance(given, str):
        given = {"url": given}
    return ReplicaOptions(**{**_checked(ReplicaOptions, given, where), **more})


def read_keys(path: str) -> tuple[KeyOptions, ...]:
    """The keys of a file: a list of them, or an object with `keys`. Raises GatewayError."""
    told = _read(path)
    listed = told.get("keys") if isinstance(told, dict) else told
    return tuple(_keys(listed, path))


def _keys(listed: Any, path: str) -> Sequence[KeyOptions]:
    if not isinstance(listed, list):
        raise GatewayError(f"{path}: keys: expected a list")
    return [KeyOptions(**_checked(KeyOptions, key, f"{path}: keys[{i}]")) for i, key in enumerate(listed)]


_NUMBERS = ("health_interval", "health_timeout", "stall_timeout", "patience")
_LISTS = ("replicas", "backups", "keys")
_TEXTS = ("admin_key", "quota_file")


def read_config(path: str) -> dict[str, Any]:
    """The fields of GatewayOptions that a `gateway.yaml` gives. Raises GatewayError."""
    told = _read(path)
    if not isinstance(told, dict):
        raise GatewayError(f"{path}: expected names and values")
    known = (*_LISTS, *_NUMBERS, *_TEXTS, "labels")
    for name in told:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise GatewayError(f"{path}: unknown {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    for name in _LISTS:
        if not isinstance(told.get(name, []), list):
            raise GatewayError(f"{path}: {name}: expected a list")
    given: dict[str, Any] = {
        "replicas": (
            *(replica_options(r, f"{path}: replicas[{i}]") for i, r in enumerate(told.get("replicas", []))),
            *(replica_options(r, f"{path}: backups[{i}]", backup=True) for i, r in enumerate(told.get("backups", []))),
        ),
        "keys": tuple(_keys(told.get("keys", []), path)),
    }
    for name in _NUMBERS:
        if name in told:
            if not isinstance(told[name], (int, float)) or isinstance(told[name], bool):
                raise GatewayError(f"{path}: {name}: expected a number, got {told[name]!r}")
            given[name] = float(told[name])
    for name in _TEXTS:
        if not isinstance(told.get(name, ""), str):
            raise GatewayError(f"{path}: {name}: expected a text, got {told[name]!r}")
    if told.get("quota_file"):
        given["quota_file"] = Path(told["quota_file"])
    given["admin_key"] = told.get("admin_key", "")
    labels = told.get("labels", {})
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
        raise GatewayError(f"{path}: no YAML: {' '.join(str(error).split())}") from None
