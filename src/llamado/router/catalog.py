"""The router's model catalog: names, aliases, options, and the command that starts each model.

Sources: `-m A -m B`, a folder (`--models-dir`), presets (`--models-preset`), the user's caches, and llama-swap's
`config.yaml`. Names, folder layout and precedence are llama-server's (b11434, `tools/server/README.md`, "Using multiple
models"): the command line overrides a model's section, the section overrides `[*]`, a folder overrides the caches.
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
from llamado.flags import FlagError, ParsedFlags
from llamado.gguf.errors import SourceError
from llamado.gguf.sources import stored
from llamado.gguf.sources.catalog import CATALOG, LARGE
from llamado.gguf.sources.ollama import find_ollama_projector
from llamado.gguf.sources.projector import input_kinds, projector_beside
from llamado.gguf.sources.resolve import cache_dir
from llamado.gguf.sources.stored import hub_files, hub_projector
from llamado.gguf.sources.urls import large_folder
from llamado.installation import own_command
from llamado.router import presets
from llamado.router.presets import Options

log = logging.getLogger("llamado.router")


class CatalogError(LlamadoError):
    """The models cannot be listed: a folder is missing, or two models share a name."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Command, readiness check and shutdown of a model's process."""

    args: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    """Address of a foreign server; "" for llamado, which listens on a Unix socket of the router."""
    check: str = "/health"
    """Path that returns 200 once the server is ready; "" if an open port is enough."""
    ready_timeout: float = 3600.0
    """Seconds until the process must be ready."""
    stop_timeout: float = presets.DEFAULT_STOP_TIMEOUT
    """Seconds between SIGTERM (or `stop`) and SIGKILL."""
    stop: tuple[str, ...] = ()
    """Command to run instead of sending SIGTERM; `${PID}` is replaced by the process id."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A llama-swap group: rules for models running side by side."""

    name: str
    swap: bool = True
    """True if only one model of the group may run at a time."""
    exclusive: bool = True
    """True if starting a model of this group stops the models of other groups."""
    persistent: bool = False
    """True if other groups never stop this group's models."""


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """Changes to request bodies. Without any, bodies are forwarded unchanged, byte for byte."""

    model: str = ""
    strip: tuple[str, ...] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    set_by_name: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.model or self.strip or self.set or self.set_by_name)

    def apply(self, body: dict[str, Any], requested: str) -> None:
        """Change the body of a request that named the model `requested`."""
        for key in self.strip:
            body.pop(key, None)
        for values in (self.set, self.set_by_name.get(requested, {})):
            body.update({key: value for key, value in values.items() if key != "model"})
        if self.model:
            body["model"] = self.model


@dataclass(frozen=True, kw_only=True)
class RoutedModel:
    """A model of the router."""

    name: str
    source: str
    """command_line, models_dir, preset, cache or config."""
    launch: Launch
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    path: str = ""
    input_modalities: tuple[str, ...] = ("text",)
    """Input of the model, as far as it is known before the model is loaded."""
    preset: str = ""
    """The options as a section of a preset file."""
    load_on_startup: bool = False
    hidden: bool = False
    """True if the model is served but not listed."""
    ttl: float = 0.0
    """Idle seconds until the model is unloaded; 0: never."""
    sleeps: bool = False
    """True if the model's server unloads and reloads the model by itself."""
    group: Group | None = None
    limit: int = 0
    """Most concurrent requests; 0: no limit."""
    rewrite: Rewrite = field(default_factory=Rewrite)
    title: str = ""
    description: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    alias_titles: Mapping[str, str] = field(default_factory=dict)
    """Titles of the aliases that are listed as separate models."""


class Catalog:
    """Models by name and alias. Raises CatalogError for ambiguous names."""

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
        """Return the model with this name or alias."""
        found = self._names.get(name)
        return None if found is None else self.models[found]


@dataclass(kw_only=True)
class _Entry:
    """A model while its options are being merged."""

    name: str
    source: str
    options: Options
    extra: dict[str, str] = field(default_factory=dict)
    hidden: bool = False


def load(flags: ParsedFlags, others: Iterable[RoutedModel] = ()) -> Catalog:
    """Return the models selected by the flags, together with `others`. Raises FlagError, CatalogError, PresetError."""
    hub = hub_files()
    models = [*others, *(_finish(entry, hub) for entry in _entries(flags))]
    return Catalog(sorted(models, key=lambda model: model.name))


def _entries(flags: ParsedFlags) -> list[_Entry]:
    named = bool(flags.model)
    # Naming models (or a config.yaml) selects those only, not everything in the caches.
    cached = {} if named or flags.llama_swap else cached_models()
    local = models_in(flags.models_dir) if flags.models_dir else {}
    sections = presets.read_presets(flags.models_preset) if flags.models_preset else {}
    everywhere, everywhere_extra = sections.pop("*", ({}, {}))

    entries: dict[str, _Entry] = {}
    for name, options in cached.items():
        entries[name] = _Entry(name=name, source="cache", options=options)
    for name, path in local.items():
        options = {"model": (str(path),)}
        # As in llama-server, a folder of its own has the files of one model.
        if path.parent != Path(flags.models_dir) and (projector := projector_beside(path)) is not None:
            options["mmproj"] = (str(projector),)
        entries[name] = _Entry(name=name, source="models_dir", options=options)
    for name, (options, extra) in sections.items():
        base = entries.get(name)
        entry = _Entry(name=name, source="preset", options=({} if base is None else base.options) | options)
        entry.extra = extra
        if not presets.WHICH & set(entry.options):
            if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name, re.ASCII):
                message = "%s [%s]: which model? Give model = FILE or hf-repo = REPOSITORY; the section is ignored"
                log.error(message, flags.models_preset, name)
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
    """`dedup-cache-models`: hide cached models that a preset uses."""
    used = set()
    for entry in entries.values():
        if entry.source == "preset" and presets.is_enabled("dedup-cache-models", entry.extra):
            for name in entry.options.get("hf_repo", ()):
                full = presets.canonical(name) if ":" in name else name
                used |= {
                    other for other in cached if other == full or (":" not in full and other.startswith(f"{full}:"))
                }
    for name in used:
        if entries[name].source == "cache":
            entries[name].hidden = True


def _command_line(flags: ParsedFlags) -> list[_Entry]:
    """`-m A -m B --alias name=A`: assign each alias to the file it names, or to the only file."""
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
        # The file name stays valid as an alias.
        others += [n for n in (Path(spec).name, spec) if n not in (name, *others)]
        if stems.count(_stem(spec)) > 1:
            others = [n for n in others if n != Path(spec).name]
        entries.append(
            _Entry(name=name, source="command_line", options={"model": (spec,), "alias": (",".join(others),)})
        )
    return entries


def _stem(spec: str) -> str:
    return Path(spec).name.removesuffix(".gguf")


def _finish(entry: _Entry, hub: Mapping[str, Path]) -> RoutedModel:
    """Return the entry as a model, including the arguments of its process. `hub`: cached files of the hub."""
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
        input_modalities=("text", *_media_kinds(options, hub)),
        preset=presets.ini_text(entry.name, options, entry.extra),
        load_on_startup=presets.is_enabled("load-on-startup", entry.extra),
        hidden=entry.hidden,
        sleeps=sleeps not in ("-1", "") or os.environ.get("LLAMA_ARG_SLEEP_IDLE_SECONDS", "-1") != "-1",
    )


def _media_kinds(options: Options, hub: Mapping[str, Path]) -> tuple[str, ...]:
    """Return the media that a model takes, if its projector is on this machine."""
    projector = _projector(options, hub)
    return () if projector is None else input_kinds(projector)


def _projector(options: Options, hub: Mapping[str, Path]) -> Path | None:
    """Return the projector file of a model's process, or None if it has none or it is not known yet."""
    if "mmproj" in options or "mmproj_url" in options:
        return Path(options.get("mmproj", ("",))[-1]).expanduser()
    if not presets.is_true(options.get("mmproj_auto", ("true",))[-1]):
        return None
    name = options.get("model", ("",))[-1]
    if name.startswith("ollama:"):
        try:
            return find_ollama_projector(name.removeprefix("ollama:"))
        except SourceError:
            return None
    repo = name.removeprefix("hf:") if name.startswith("hf:") else options.get("hf_repo", ("",))[-1]
    if not repo or "hf_file" in options:
        return None
    repo = presets.canonical(repo)
    path = hub.get(repo) or next((path for full, path in hub.items() if full.startswith(f"{repo}:")), None)
    return None if path is None else hub_projector(path)


def models_in(folder: str) -> dict[str, Path]:
    """Return the models of a folder by name. Raises CatalogError."""
    try:
        return stored.models_in(folder)
    except SourceError as error:
        raise CatalogError(f"--models-dir {error}") from None


def cached_models() -> dict[str, Options]:
    """Return the downloaded models: catalog names, and `user/model:QUANT` from the hub's cache."""
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
