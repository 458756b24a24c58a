"""Which models there are, what they are called, and how the process of each is started.

Sources: `-m A -m B`, a folder (`--models-dir`), presets (`--models-preset`), the user's caches, and llama-swap's
`config.yaml`. Names, folder layout and precedence are llama-server's (b11434, `tools/server/README.md`, "Using multiple
models"): the command line wins over a model's section, that over `[*]`; a folder's model wins over a cached one.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamado.errors import LlamadoError
from llamado.flags import FlagError, Parsed
from llamado.gguf.errors import SourceError
from llamado.gguf.sources import stored
from llamado.gguf.sources.catalog import CATALOG, LARGE
from llamado.gguf.sources.resolve import cache_dir
from llamado.gguf.sources.stored import hub_files
from llamado.gguf.sources.urls import large_folder
from llamado.installation import own_command
from llamado.router import presets
from llamado.router.presets import Options

log = logging.getLogger("llamado.router")


class CatalogError(LlamadoError):
    """Models that cannot be listed: a folder that is none, two models of one name."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a model's process is started, known to be ready, and ended."""

    args: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    """Where it will answer; empty: one of ours, told to listen on a Unix socket of the router's."""
    check: str = "/health"
    """Path that answers 200 when it is ready; empty: an open port is enough."""
    ready_timeout: float = 3600.0
    """Seconds it may take to get ready."""
    stop_timeout: float = presets.DEFAULT_STOP_TIMEOUT
    """Seconds between asking it to end and ending it."""
    stop: tuple[str, ...] = ()
    """Command that ends it, instead of SIGTERM; `${PID}` stands for its process id."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Models that may or may not run side by side (llama-swap's groups)."""

    name: str
    swap: bool = True
    """Only one of the group runs at a time."""
    exclusive: bool = True
    """While one of the group starts, other groups' models end."""
    persistent: bool = False
    """Other groups never end this one's models."""


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """What is changed in request bodies; without any of it they are passed on byte for byte."""

    model: str = ""
    strip: tuple[str, ...] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    set_by_name: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.model or self.strip or self.set or self.set_by_name)

    def apply(self, body: dict[str, Any], asked: str) -> None:
        """Change a request's body that asked for the model by the name `asked`."""
        for key in self.strip:
            body.pop(key, None)
        for values in (self.set, self.set_by_name.get(asked, {})):
            body.update({key: value for key, value in values.items() if key != "model"})
        if self.model:
            body["model"] = self.model


@dataclass(frozen=True, kw_only=True)
class RoutedModel:
    """One model of the router."""

    name: str
    source: str
    """command_line, models_dir, preset, cache or config."""
    launch: Launch
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    path: str = ""
    preset: str = ""
    """Its options as a section of a preset file."""
    load_on_startup: bool = False
    hidden: bool = False
    """Not listed, but answered when asked for."""
    ttl: float = 0.0
    """Seconds without a request after which it is unloaded; 0: never."""
    sleeps: bool = False
    """Whether its process may unload the model by itself and load it again."""
    group: Group | None = None
    limit: int = 0
    """Most requests at a time; 0: no limit."""
    rewrite: Rewrite = field(default_factory=Rewrite)
    title: str = ""
    description: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    alias_titles: Mapping[str, str] = field(default_factory=dict)
    """Aliases that are listed as models of their own, with their titles."""


class Catalog:
    """The models by name and alias. Raises CatalogError where a name means two."""

    def __init__(self, models: Iterable[RoutedModel]) -> None:
        self.models: dict[str, RoutedModel] = {}
        self._names: dict[str, str] = {}
        for model in models:
            if model.name in self._names:
                raise CatalogError(f"two models are called {model.name!r}: name them apart with --alias NAME=FILE")
            self.models[model.name] = model
            self._names[model.name] = model.name
        for model in self.models.values():
            for alias in model.aliases:
                if self._names.setdefault(alias, model.name) != model.name:
                    raise CatalogError(f"the alias {alias!r} of {model.name!r} means {self._names[alias]!r} already")

    def find(self, name: str) -> RoutedModel | None:
        """The model of a name or an alias."""
        found = self._names.get(name)
        return None if found is None else self.models[found]


@dataclass(kw_only=True)
class _Entry:
    """A model while its options are gathered."""

    name: str
    source: str
    options: Options
    extra: dict[str, str] = field(default_factory=dict)
    hidden: bool = False


def load(flags: Parsed, others: Iterable[RoutedModel] = ()) -> Catalog:
    """The models that the flags name, and others. Raises FlagError, CatalogError, PresetError."""
    models = [*others, *(_finish(entry) for entry in _entries(flags))]
    return Catalog(sorted(models, key=lambda model: model.name))


def _entries(flags: Parsed) -> list[_Entry]:
    named = bool(flags.model)
    # Whoever names models one by one, or has a config.yaml, means these and not what happens to lie in a cache.
    cached = {} if named or flags.llama_swap else cached_models()
    local = models_in(flags.models_dir) if flags.models_dir else {}
    sections = presets.read_presets(flags.models_preset) if flags.models_preset else {}
    everywhere, everywhere_extra = sections.pop("*", ({}, {}))

    entries: dict[str, _Entry] = {}
    for name, options in cached.items():
        entries[name] = _Entry(name=name, source="cache", options=options)
    for name, path in local.items():
        entries[name] = _Entry(name=name, source="models_dir", options={"model": (str(path),)})
    for name, (options, extra) in sections.items():
        known = entries.get(name)
        entry = _Entry(name=name, source="preset", options=({} if known is None else known.options) | options)
        entry.extra = extra
        if not presets.WHICH & set(entry.options):
            if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name, re.ASCII):
                told = "%s [%s]: which model? Give model = FILE or hf-repo = REPOSITORY; the section is left out"
                log.error(told, flags.models_preset, name)
                continue
            entry.options["hf_repo"] = (name,)
        entries[name] = entry
    for entry in _command_line(flags):
        if entry.name in entries:
            raise CatalogError(f"two models are called {entry.name!r}: name them apart with --alias NAME=FILE")
        entries[entry.name] = entry

    own = presets.command_line(flags)
    for entry in entries.values():
        entry.options = everywhere | entry.options | own
        entry.extra = everywhere_extra | entry.extra
    _hide_duplicates(entries, cached)
    return list(entries.values())


def _hide_duplicates(entries: dict[str, _Entry], cached: Mapping[str, Options]) -> None:
    """`dedup-cache-models`: a cached model that a preset uses is listed once."""
    used = set()
    for entry in entries.values():
        if entry.source == "preset" and presets.wants("dedup-cache-models", entry.extra):
            for name in entry.options.get("hf_repo", ()):
                known = presets.canonical(name) if ":" in name else name
                used |= {
                    other for other in cached if other == known or (":" not in known and other.startswith(f"{known}:"))
                }
    for name in used:
        if entries[name].source == "cache":
            entries[name].hidden = True


def _command_line(flags: Parsed) -> list[_Entry]:
    """`-m A -m B --alias name=A`: an alias belongs to the file it names, or to the only one."""
    specs: list[str] = flags.model or []
    aliases: dict[str, list[str]] = {spec: [] for spec in specs}
    if len(aliases) < len(specs):
        raise FlagError(f"-m/--model: {next(s for s in specs if specs.count(s) > 1)} is given twice")
    given = [part.strip() for text in flags.alias or [] for part in text.split(",") if part.strip()]
    for text in given:
        name, equals, file = text.partition("=")
        if not equals:
            if len(specs) != 1:
                raise FlagError(f"-a/--alias {text}: of which model? Write --alias {text}=FILE")
            aliases[specs[0]].append(text)
            continue
        found = [spec for spec in specs if file in (spec, Path(spec).name, _stem(spec))]
        if len(found) != 1 or not name:
            among = ", ".join(specs) or "there is no -m"
            raise FlagError(f"-a/--alias {text}: expected NAME=FILE with FILE one of: {among}")
        aliases[found[0]].append(name)
    stems = [_stem(spec) for spec in specs]
    entries = []
    for spec in specs:
        stem = _stem(spec) if stems.count(_stem(spec)) == 1 else spec
        name, *others = [*aliases[spec], stem]
        # The file's own name goes on meaning it; what else is said in a request comes from its alias.
        others += [n for n in (Path(spec).name, spec) if n not in (name, *others)]
        if stems.count(_stem(spec)) > 1:
            others = [n for n in others if n != Path(spec).name]
        entries.append(
            _Entry(name=name, source="command_line", options={"model": (spec,), "alias": (",".join(others),)})
        )
    return entries


def _stem(spec: str) -> str:
    return Path(spec).name.removesuffix(".gguf")


def _finish(entry: _Entry) -> RoutedModel:
    """The model of an entry, with the arguments its process gets."""
    options = {key: value for key, value in entry.options.items() if key not in presets.CONTROLLED}

    def listed(key: str) -> tuple[str, ...]:
        parts = (part.strip() for text in entry.options.get(key, ()) for part in text.split(","))
        return tuple(sorted({part for part in parts if part} - {entry.name}))

    shown = options | ({"tags": entry.options["tags"]} if listed("tags") else {})
    args = own_command("serve", *presets.arguments(shown), *presets.argument("--alias", entry.name))
    path = options.get("model", ("",))[-1]
    sleeps = options.get("sleep_idle_seconds", ("-1",))[-1]
    return RoutedModel(
        name=entry.name,
        source=entry.source,
        launch=Launch(
            args=tuple(args),
            env=presets.environment() | presets.secrets(options),
            stop_timeout=presets.stop_timeout(entry.name, entry.extra),
        ),
        aliases=listed("alias"),
        tags=listed("tags"),
        path=str(Path(path).absolute()) if path.endswith(".gguf") else path,
        preset=presets.ini_text(entry.name, options, entry.extra),
        load_on_startup=presets.wants("load-on-startup", entry.extra),
        hidden=entry.hidden,
        sleeps=sleeps not in ("-1", "") or os.environ.get("LLAMA_ARG_SLEEP_IDLE_SECONDS", "-1") != "-1",
    )


def models_in(folder: str) -> dict[str, Path]:
    """Models of a folder by name. Raises CatalogError."""
    try:
        return stored.models_in(folder)
    except SourceError as error:
        raise CatalogError(f"--models-dir {error}") from None


def cached_models() -> dict[str, Options]:
    """Models that were fetched before: those with a name, and `user/model:QUANT` of the hub's cache."""
    found: dict[str, Options] = {}
    for name, entry in CATALOG.items():
        if entry.is_at(cache_dir() / "models" / entry.file_name):
            found[name] = {"model": (name,)}
    for name, large in LARGE.items():
        if (large_folder() / large.file_name).is_file():
            found[name] = {"model": (name,)}
    for name in hub_files():
        found[name] = {"hf_repo": (name,)}
    return dict(sorted(found.items()))
