"""Reader for llama-swap's `config.yaml`: server commands, names, groups, time to live.

Keys, defaults and meanings follow llama-swap's `config.example.yaml`. Unsupported keys are logged.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from llamado.errors import LlamadoError
from llamado.processes.secret_values import secret
from llamado.router import presets
from llamado.router.catalog import Group, Launch, Rewrite, RoutedModel
from llamado.router.peers import Peer

log = logging.getLogger("llamado.router")


class SwapConfigError(LlamadoError):
    """A `config.yaml` is invalid."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TOP = _words(
    "healthCheckTimeout logLevel startPort macros models groups hooks globalTTL includeAliasesInList apiKeys peers"
)
# Known keys without effect here.
_QUIET = _words("logTimeFormat logToStdout logRequests metricsMaxInMemory captureBuffer sendLoadingState")
_MODEL = _words(
    "cmd cmdStop proxy checkEndpoint ttl aliases env useModelName filters unlisted concurrencyLimit name description "
    "metadata macros"
)
_MODEL_QUIET = _words("sendLoadingState timeouts capabilities")
_FILTERS = _words("strip_params stripParams setParams setParamsByID")
_GROUP = _words("swap exclusive persistent members")
_PEER = _words("proxy apiKey models filters timeouts")
_TIMEOUTS = _words("connect keepalive responseHeader tlsHandshake expectContinue idleConn")
_MIN_HEALTH = 15.0
_STOP_TIMEOUT = 5.0  # llama-swap's
_DEFAULT_GROUP = Group(name="(default)")
_MACRO = re.compile(r"\$\{([A-Za-z0-9_.-]+)\}")


@dataclass(frozen=True, kw_only=True)
class SwapConfig:
    """Contents of a `config.yaml`."""

    models: list[RoutedModel]
    peers: tuple[Peer, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    preload: tuple[str, ...] = ()
    log_level: str = "info"


@dataclass
class _ConfigReader:
    path: str
    ports: int
    unknown: list[str] = field(default_factory=list)

    def fail(self, where: str, message: str) -> SwapConfigError:
        return SwapConfigError(f"{self.path}: {where}: {message}")

    def check(self, where: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
        self.unknown += [f"{where}.{key}" if where else str(key) for key in given if key not in known]

    def mapping(self, where: str, value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(where, f"expected keys and values, got {value!r:.60}")
        return {str(key): item for key, item in value.items()}

    def texts(self, where: str, value: Any) -> list[str]:
        if value is None:
            return []
        if not isinstance(value, list) or any(isinstance(item, (dict, list)) for item in value):
            raise self.fail(where, f"expected a list of texts, got {value!r:.60}")
        return [str(item) for item in value]

    def number(self, where: str, value: Any, default: float) -> float:
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(where, f"expected a number, got {value!r:.60}")
        return float(value)

    def switch(self, where: str, value: Any, default: bool) -> bool:
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(where, f"expected true or false, got {value!r:.60}")
        return value


def read_swap_config(path: str | Path) -> SwapConfig:
    """Read llama-swap's configuration. Raises SwapConfigError."""
    try:
        root = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SwapConfigError(f"--config {path}: {error}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SwapConfigError(f"--config {path}: no YAML: {error}") from None
    if _is_huge(root):
        raise SwapConfigError(f"--config {path}: its aliases expand without end")
    reader = _ConfigReader(str(path), 0)
    top = reader.mapping("the file", root)
    reader.check("", top, _TOP | _QUIET)
    reader.ports = int(reader.number("startPort", top.get("startPort"), 5800))
    if not 1 <= reader.ports <= 65535:
        raise reader.fail("startPort", f"expected 1 to 65535, got {reader.ports}")
    config = _read(reader, top)
    if reader.unknown:
        log.warning("%s: not supported and left out: %s", path, ", ".join(reader.unknown))
    return config


def _is_huge(root: Any) -> bool:
    """Return True if the file, with YAML aliases expanded, is unreasonably large or endless."""
    left = [root]
    for _ in range(200_000):
        if not left:
            return False
        value = left.pop()
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            left += value
    return True


def _read(reader: _ConfigReader, top: dict[str, Any]) -> SwapConfig:
    macros = reader.mapping("macros", top.get("macros"))
    health = max(_MIN_HEALTH, reader.number("healthCheckTimeout", top.get("healthCheckTimeout"), 120.0))
    ttl = reader.number("globalTTL", top.get("globalTTL"), 0.0)
    listed = reader.switch("includeAliasesInList", top.get("includeAliasesInList"), False)
    bodies = reader.mapping("models", top.get("models"))
    if not bodies and not top.get("peers"):
        raise reader.fail("models", "there is none")
    groups = _groups(reader, top.get("groups"), bodies)
    models = []
    for name in sorted(bodies):
        body = reader.mapping(f"models.{name}", bodies[name])
        reader.check(f"models.{name}", body, _MODEL | _MODEL_QUIET)
        models.append(_model(reader, name, body, macros, groups.get(name, _DEFAULT_GROUP), health, ttl, listed))
    hooks = reader.mapping("hooks", top.get("hooks"))
    reader.check("hooks", hooks, frozenset({"on_startup"}))
    start = reader.mapping("hooks.on_startup", hooks.get("on_startup"))
    reader.check("hooks.on_startup", start, frozenset({"preload"}))
    names = {name for model in models for name in (model.name, *model.aliases)}
    peers = _peers(reader, top.get("peers"), macros, names)
    preload = []
    for name in reader.texts("hooks.on_startup.preload", start.get("preload")):
        if name in names:
            preload.append(name)
        else:
            log.warning("%s: hooks.on_startup.preload: there is no model %r", reader.path, name)
    keys = [str(_fill(reader, "apiKeys", key, {})) for key in reader.texts("apiKeys", top.get("apiKeys"))]
    if not all(key.strip() for key in keys):
        # An empty key would match requests without one.
        raise reader.fail("apiKeys", "a key is empty")
    level = str(top.get("logLevel") or "info").strip().lower()
    return SwapConfig(models=models, peers=peers, api_keys=tuple(keys), preload=tuple(preload), log_level=level)


def _peers(reader: _ConfigReader, given: Any, macros: Mapping[str, Any], names: Set[str]) -> tuple[Peer, ...]:
    """Return the peers. `names`: names of this router's own models."""
    peers = []
    for name, value in reader.mapping("peers", given).items():
        where = f"peers.{name}"
        body = reader.mapping(where, value)
        reader.check(where, body, _PEER)
        url = str(_fill(reader, f"{where}.proxy", str(body.get("proxy") or ""), macros)).strip()
        if not _is_address(url):
            raise reader.fail(f"{where}.proxy", f"expected http://host:port, got {url!r}")
        models = tuple(reader.texts(f"{where}.models", body.get("models")))
        if not models:
            raise reader.fail(f"{where}.models", "there is none")
        for model in models:
            if f"{name}/{model}" in names:
                raise reader.fail(f"{where}.models", f"{name}/{model} is the name of a model of this router already")
        key = str(_fill(reader, f"{where}.apiKey", str(body.get("apiKey") or ""), macros)).strip()
        if not (key.isascii() and key.isprintable()):
            raise reader.fail(f"{where}.apiKey", "the key has characters that no header can have")
        timeouts = reader.mapping(f"{where}.timeouts", body.get("timeouts"))
        reader.check(f"{where}.timeouts", timeouts, _TIMEOUTS)
        timeout = reader.number(f"{where}.timeouts.responseHeader", timeouts.get("responseHeader"), 60.0)
        rewrite = _rewrite(reader, where, {"filters": body.get("filters")}, macros)
        peers.append(Peer(name=name, url=url, models=models, key=key, rewrite=rewrite, timeout=max(timeout, 0.0)))
    return tuple(peers)


def _groups(reader: _ConfigReader, given: Any, models: Mapping[str, Any]) -> dict[str, Group]:
    """Return each model's group."""
    member_of: dict[str, Group] = {}
    for name, value in reader.mapping("groups", given).items():
        where = f"groups.{name}"
        body = reader.mapping(where, value)
        reader.check(where, body, _GROUP)
        group = Group(
            name=name,
            swap=reader.switch(f"{where}.swap", body.get("swap"), True),
            exclusive=reader.switch(f"{where}.exclusive", body.get("exclusive"), True),
            persistent=reader.switch(f"{where}.persistent", body.get("persistent"), False),
        )
        for member in reader.texts(f"{where}.members", body.get("members")):
            if member not in models:
                raise reader.fail(f"{where}.members", f"there is no model {member!r}")
            if member in member_of:
                raise reader.fail(f"{where}.members", f"{member!r} is in {member_of[member].name!r} already")
            member_of[member] = group
    return member_of


def _macros(
    reader: _ConfigReader, where: str, name: str, body: dict[str, Any], outer: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the macros of a model: the file's, its own, and PORT if it is used."""
    macros: dict[str, Any] = {**outer, **reader.mapping(f"{where}.macros", body.get("macros")), "MODEL_ID": name}
    for key, value in macros.items():
        if isinstance(value, (dict, list)):
            raise reader.fail(f"{where}: macro {key}", "expected a text, a number or a switch")
    own = {key: body.get(key) for key in ("cmd", "proxy", "cmdStop", "checkEndpoint", "metadata")}
    if any("${PORT}" in text for text in _expanded(own, macros)):
        macros["PORT"] = reader.ports
        reader.ports += 1
    return macros


def _is_address(url: str) -> bool:
    """Return True if `url` is an HTTP address that a command can listen on."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _environment(reader: _ConfigReader, where: str, body: dict[str, Any], macros: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a model's process."""
    env = dict(presets.environment())
    for text in reader.texts(f"{where}.env", body.get("env")):
        variable, equals, value = str(_fill(reader, f"{where}.env", text, macros)).partition("=")
        if not equals or not variable:
            raise reader.fail(f"{where}.env", f"expected NAME=VALUE, got {text!r}")
        env[variable] = value
    return env


def _model(
    reader: _ConfigReader,
    name: str,
    body: dict[str, Any],
    outer: Mapping[str, Any],
    group: Group,
    health: float,
    ttl: float,
    listed: bool,
) -> RoutedModel:
    where = f"models.{name}"
    macros = _macros(reader, where, name, body, outer)

    def filled(key: str, default: str = "") -> str:
        value = body.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise reader.fail(f"{where}.{key}", f"expected a text, got {value!r:.60}")
        return str(_fill(reader, f"{where}.{key}", value, macros))

    def shown(key: str) -> str:
        """Return a display text; numbers and the like are converted to text."""
        return str(_fill(reader, f"{where}.{key}", str(body.get(key) or ""), macros)).strip()

    def words(key: str) -> list[str]:
        try:
            return command(filled(key))
        except SwapConfigError as error:
            raise reader.fail(f"{where}.{key}", str(error)) from None

    args = words("cmd")
    if not args:
        raise reader.fail(f"{where}.cmd", "there is no command")
    url = filled("proxy") or (f"http://localhost:{macros['PORT']}" if "PORT" in macros else "")
    if not url:
        raise reader.fail(f"{where}.proxy", "where does the command listen? Use ${PORT} in cmd, or give proxy: URL")
    if not _is_address(url):
        raise reader.fail(f"{where}.proxy", f"expected http://host:port, got {url!r}")
    check = filled("checkEndpoint", "/health").strip()
    env = _environment(reader, where, body, macros)
    own_ttl = reader.number(f"{where}.ttl", body.get("ttl"), -1.0)
    # ${PID} is replaced when the process runs.
    stop = words("cmdStop")
    aliases, titles = _aliases(reader, where, body.get("aliases"), macros)
    rewrite = _rewrite(reader, where, body, macros)
    aliases += [other for other in rewrite.set_by_name if other != name and other not in aliases]
    return RoutedModel(
        name=name,
        source="config",
        launch=Launch(
            args=tuple(args),
            env=env,
            url=url,
            check="" if check == "none" else "/" + check.lstrip("/"),
            ready_timeout=health,
            stop_timeout=_STOP_TIMEOUT,
            stop=tuple(stop),
        ),
        aliases=tuple(aliases),
        hidden=reader.switch(f"{where}.unlisted", body.get("unlisted"), False),
        ttl=ttl if own_ttl < 0 else own_ttl,
        group=group,
        limit=max(0, int(reader.number(f"{where}.concurrencyLimit", body.get("concurrencyLimit"), 0.0))),
        rewrite=rewrite,
        title=shown("name"),
        description=shown("description"),
        metadata=reader.mapping(f"{where}.metadata", _fill(reader, f"{where}.metadata", body.get("metadata"), macros)),
        alias_titles=titles if listed else {},
    )


def _aliases(
    reader: _ConfigReader, where: str, given: Any, macros: Mapping[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """Return the aliases, given as texts or as `{id, name, unlisted}`, and the titles of listable ones."""
    if given is not None and not isinstance(given, list):
        raise reader.fail(f"{where}.aliases", f"expected a list, got {given!r:.60}")
    names: list[str] = []
    titles: dict[str, str] = {}
    for item in given or []:
        body = item if isinstance(item, dict) else {"id": item}
        alias = str(_fill(reader, f"{where}.aliases", str(body.get("id") or ""), macros)).strip()
        if not alias:
            raise reader.fail(f"{where}.aliases", f"expected a name, got {item!r:.60}")
        names.append(alias)
        if not body.get("unlisted"):
            titles[alias] = str(_fill(reader, f"{where}.aliases", str(body.get("name") or ""), macros))
    return names, titles


def _rewrite(reader: _ConfigReader, where: str, body: dict[str, Any], macros: Mapping[str, Any]) -> Rewrite:
    filters = reader.mapping(f"{where}.filters", body.get("filters"))
    reader.check(f"{where}.filters", filters, _FILTERS)
    strip: list[str] = []
    for key in ("strip_params", "stripParams"):
        text = _fill(reader, f"{where}.filters.{key}", str(filters.get(key) or ""), macros)
        strip += [part.strip() for part in str(text).split(",") if part.strip() not in ("", "model")]
    by_name = _fill(reader, f"{where}.filters.setParamsByID", filters.get("setParamsByID"), macros)
    return Rewrite(
        model=str(_fill(reader, f"{where}.useModelName", str(body.get("useModelName") or ""), macros)),
        strip=tuple(dict.fromkeys(strip)),
        set=reader.mapping(f"{where}.filters.setParams", _fill(reader, where, filters.get("setParams"), macros)),
        set_by_name={
            str(_fill(reader, where, name, macros)): reader.mapping(f"{where}.filters.setParamsByID.{name}", values)
            for name, values in reader.mapping(f"{where}.filters.setParamsByID", by_name).items()
        },
    )


def _expanded(value: Any, macros: Mapping[str, Any]) -> Iterator[str]:
    """Yield all texts in a value, including those of macros they refer to, directly or not."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _expanded(item, macros)
    elif isinstance(value, list):
        for item in value:
            yield from _expanded(item, macros)
    elif isinstance(value, str):
        seen: set[str] = set()
        texts = [value]
        while texts:
            text = texts.pop()
            yield text
            for name in _MACRO.findall(text):
                if name in macros and name not in seen:
                    seen.add(name)
                    texts.append(str(macros[name]))


def _fill(reader: _ConfigReader, where: str, value: Any, macros: Mapping[str, Any]) -> Any:
    """Return the value with macros expanded; a text that consists of one macro takes the macro's type."""
    if isinstance(value, dict):
        return {
            str(_fill(reader, where, str(key), macros)): _fill(reader, where, item, macros)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_fill(reader, where, item, macros) for item in value]
    if not isinstance(value, str):
        return value
    # Macros may contain macros; the bound stops cycles.
    for _ in range(32):
        whole = _MACRO.fullmatch(value.strip())
        if whole and whole[1] in macros and not isinstance(macros[whole[1]], str):
            return macros[whole[1]]
        replaced = _MACRO.sub(lambda found: _one(reader, where, found[1], macros), value)
        if replaced == value:
            return value
        if len(replaced) > 1 << 20:
            break
        value = replaced
    raise reader.fail(where, f"macros that contain one another: {value:.60}")


def _one(reader: _ConfigReader, where: str, name: str, macros: Mapping[str, Any]) -> str:
    if name.startswith("env."):
        variable = name.removeprefix("env.")
        value = os.environ.get(variable) or secret(variable)
        if value is None:
            raise reader.fail(where, f"the environment has no {variable}")
        return value
    if name == "PID":
        return "${PID}"
    if name not in macros:
        raise reader.fail(where, f"there is no macro ${{{name}}}")
    value = macros[name]
    return str(value).lower() if isinstance(value, bool) else str(value)


def command(text: str) -> list[str]:
    """Split a multi-line command into words, without comments and trailing backslashes.

    Raises SwapConfigError.
    """
    lines = []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("#"):
            continue
        lines.append(line[:-1] if line.endswith("\\") else line)
    try:
        return shlex.split(" ".join(lines))
    except ValueError as error:
        raise SwapConfigError(f"a command that cannot be split into words ({error}): {text.strip()[:200]}") from None
