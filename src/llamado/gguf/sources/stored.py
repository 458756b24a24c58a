"""Models stored on this machine: in our cache, in the Hugging Face hub's cache, and in Ollama's store."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llamado.gguf.errors import SourceError
from llamado.gguf.shards import shard_names
from llamado.gguf.sources.catalog import CATALOG, LARGE
from llamado.gguf.sources.ollama import find_ollama_model, installed, store
from llamado.gguf.sources.projector import WORD, best_projector
from llamado.gguf.sources.resolve import cache_dir
from llamado.gguf.sources.urls import large_folder

# Files that accompany a model (common/preset.cpp, b11434).
_DRAFTS = ("mtp-", "dspark-", "dflash-")
_QUANT = re.compile(r"[-.]([A-Z0-9_]+)$", re.IGNORECASE)
_PARTIAL_SUFFIXES = (".part", ".unpacking", ".incomplete")


@dataclass(frozen=True)
class StoredModel:
    """A stored model, complete or partially fetched."""

    name: str
    """Name used by the router; for a hub model also the value of `-hf`."""
    path: Path
    """Model file; of a split model the first."""
    files: tuple[Path, ...]
    """All files of the model, partially fetched ones included."""
    source: str
    """cache (ours), hub, ollama, or folder."""
    size_due: int | None = None
    """Size of the complete file in bytes, if known."""

    @property
    def spec(self) -> str:
        """Value for `-m`, if the model has a name."""
        return f"hf:{self.name}" if self.source == "hub" else self.name

    @property
    def argument(self) -> str:
        """Value for `-m` that fetches nothing: a name or the path."""
        named = self.source in ("hub", "ollama") or self.name in CATALOG or self.name in LARGE
        return self.spec if named else str(self.path)

    @property
    def is_complete(self) -> bool:
        """Return True if every byte of the model is stored."""
        if not self.path.is_file() or any(_is_partial(file) for file in self.files):
            return False
        return self.size_due is None or self.path.stat().st_size == self.size_due

    @property
    def size(self) -> int:
        """Return the bytes on the disk."""
        return sum(stat.st_size for stat in self._stats())

    @property
    def last_used(self) -> float:
        """Return the time of the last read or write in seconds since 1970, if the file system records it."""
        return max((max(stat.st_atime, stat.st_mtime) for stat in self._stats()), default=0.0)

    @property
    def is_removable(self) -> bool:
        """Return True if llamado may delete it: it is in our cache or the hub's."""
        return self.source in ("cache", "hub")

    def _stats(self) -> Iterator[os.stat_result]:
        for file in self.files:
            try:
                yield file.stat()
            except OSError:
                continue


def stored_models() -> list[StoredModel]:
    """Return all stored models, sorted by name."""
    found = [*_from_own_cache(), *_from_hub_cache(), *_from_ollama()]
    return sorted(found, key=lambda model: model.name)


def find_stored(name: str) -> StoredModel:
    """Return the model with this name (as in `stored_models`) or file name. Raises SourceError for none or several."""
    models = stored_models()
    wanted = name.removeprefix("hf:").lower()
    found = [model for model in models if name in (model.name, str(model.path)) or wanted == model.name.lower()]
    if not found:
        found = [m for m in models if wanted in (m.path.name.lower(), m.name.lower().rpartition(":")[0])]
    if len(found) == 1:
        return found[0]
    if not found:
        there = ", ".join(model.name for model in models[:12])
        raise SourceError(
            f"no model {name!r} is stored here" + (f"; stored: {there}" if there else "; fetch one with llamado pull")
        )
    raise SourceError(f"{name!r} is ambiguous: {', '.join(model.name for model in found)}")


def file_of(name: str) -> Path:
    """Return the file of a stored model by path or name. Raises SourceError, also if the model is not fetched yet."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        found = find_stored(name)
    except SourceError:
        found = None
    if found is not None and found.is_complete:
        return found.path
    if found is not None or name in CATALOG or name in LARGE:
        raise SourceError(f"{name} is not fetched yet: run llamado pull {name}")
    raise SourceError(f"{name}: there is no such file; llamado list shows the models that are here")


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return a model's file and, if it is the first of a split model, the other parts."""
    return tuple(path.parent / part for part in shard_names(path.name) or [path.name])


def is_model(name: str) -> bool:
    """Return True if a file with this name is a model and not an accompanying file."""
    return name.endswith(".gguf") and WORD not in name and not name.startswith(_DRAFTS)


def models_in(folder: str) -> dict[str, Path]:
    """Return the models of a folder by name: its GGUF files, and sub-folders with one (possibly split) model each."""
    root = Path(folder)
    if not root.is_dir():
        raise SourceError(f"{folder}: there is no such folder")
    found: dict[str, Path] = {}
    try:
        for path in sorted(root.iterdir()):
            if path.is_dir():
                inside = _model_inside(path)
                if inside is not None:
                    found[path.name] = inside
            elif path.is_file() and is_model(path.name):
                parts = shard_names(path.name)
                if parts is None or parts[0] == path.name:
                    found[path.name.removesuffix(".gguf")] = path
    except OSError as error:
        raise SourceError(f"{folder}: {error}") from None
    return found


def _model_inside(folder: Path) -> Path | None:
    files = sorted(path for path in folder.iterdir() if path.is_file() and is_model(path.name))
    first = [path for path in files if "-00001-of-" in path.name]
    whole = [path for path in files if shard_names(path.name) is None]
    return next(iter(first or whole), None)


def model_folders() -> list[Path]:
    """Return the existing folders that models are fetched into: ours, and the Hugging Face hub's."""
    return [folder for folder in (cache_dir() / "models", large_folder(), hub_cache()) if folder.is_dir()]


def hub_cache() -> Path:
    """Return the Hugging Face hub's cache, from the variables read by its library and llama.cpp."""
    for name, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser() / below
    return Path("~/.cache/huggingface/hub").expanduser()


def hub_files() -> dict[str, Path]:
    """Return the files in the hub's cache by `user/model:QUANT`; of a split model the first part, if all are there."""
    found: dict[str, Path] = {}
    for folder in _hub_folders():
        for path in _snapshot(folder):
            parts = shard_names(path.name)
            if not path.exists() or not is_model(path.name) or "imatrix" in path.name:
                continue
            if parts is not None and (parts[0] != path.name or not all((path.parent / p).exists() for p in parts)):
                continue
            quant = _QUANT.search(_stem(path.name))
            if quant is not None:
                found.setdefault(f"{_repo(folder)}:{quant[1].upper()}", path)
    return found


def hub_projector(model: Path) -> Path | None:
    """Return the cached projector of a model's file in the hub's cache, or None."""
    return next((found[model] for found in map(_projectors, _hub_folders()) if model in found), None)


def _projectors(folder: Path) -> dict[Path, Path]:
    """Return the projectors of the models of a cached repository, by the model's (first) file."""
    root = folder / "snapshots"
    files = {path.relative_to(root).as_posix(): path for path in _snapshot(folder) if path.exists()}
    found = {}
    for name, path in files.items():
        if is_model(path.name) and parts_of(path)[0] == path:
            projector = best_projector(files, name)
            if projector is not None:
                found[path] = files[projector]
    return found


def _with_own_projector(path: Path, projectors: Mapping[Path, Path]) -> tuple[Path, ...]:
    """Return all files of a model, with its projector if no other model has the same."""
    projector = projectors.get(path)
    is_own = projector is not None and list(projectors.values()).count(projector) == 1
    return (*parts_of(path), projector) if projector is not None and is_own else parts_of(path)


def remove(model: StoredModel) -> int:
    """Delete a model's files and return their size in bytes. Raises SourceError if llamado did not fetch them."""
    if not model.is_removable:
        raise SourceError(f"{model.name} was not fetched by llamado: {model.path} is not deleted")
    size = model.size
    for file in model.files:
        try:
            _remove_file(file)
        except OSError as error:
            raise SourceError(f"cannot delete {file}: {error.strerror or error}") from None
    return size


def _is_partial(path: Path) -> bool:
    return path.suffix in _PARTIAL_SUFFIXES


def _stem(name: str) -> str:
    return re.sub(r"-\d{5}-of-\d{5}$", "", name.removesuffix(".gguf"))


def _with_partial_files(files: Iterable[Path]) -> tuple[Path, ...]:
    """Return the existing files, and the partial downloads beside them."""
    all_files = [
        other for file in files for other in (file, *(file.with_name(file.name + end) for end in _PARTIAL_SUFFIXES))
    ]
    return tuple(file for file in all_files if file.is_file())


def _from_own_cache() -> Iterator[StoredModel]:
    """Yield models of the catalog, and models fetched from a URL."""
    models = cache_dir() / "models"
    seen: set[Path] = set()
    for name, entry in CATALOG.items():
        path = models / entry.file_name
        wheels = [models / f"{wheel.project}-{wheel.version}.whl" for wheel in entry.wheels]
        files = _with_partial_files([path, *wheels])
        seen |= {path, *files}
        if files:
            yield StoredModel(name, path, files, "cache", entry.size)
    for name, large in LARGE.items():
        path = large_folder() / large.file_name
        files = _with_partial_files(parts_of(path))
        if files:
            yield StoredModel(name, path, files, "cache")
    for path in sorted({_without_end(file) for file in _folder(models)} - seen):
        parts = shard_names(path.name)
        if path.suffix == ".gguf" and (parts is None or parts[0] == path.name):
            files = _with_partial_files(parts_of(path))
            if files:
                yield StoredModel(path.name.removesuffix(".gguf"), path, files, "cache")


def _without_end(path: Path) -> Path:
    return path.with_suffix("") if _is_partial(path) else path


def _folder(path: Path) -> list[Path]:
    try:
        return [file for file in path.iterdir() if file.is_file()]
    except OSError:
        return []


def _from_hub_cache() -> Iterator[StoredModel]:
    whole = hub_files()
    projectors = {path: projector for folder in _hub_folders() for path, projector in _projectors(folder).items()}
    for name, path in whole.items():
        yield StoredModel(name, path, _with_own_projector(path, projectors), "hub")
    for folder in _hub_folders():
        for path in _snapshot(folder):
            parts = parts_of(path)
            if parts[0] == path and path not in whole.values() and is_model(path.name) and "imatrix" not in path.name:
                yield StoredModel(_repo(folder), path, tuple(part for part in parts if part.exists()), "hub")
        # The name of a partial blob does not tell which file it belongs to.
        begun = tuple(file for file in _folder(folder / "blobs") if _is_partial(file))
        if begun:
            yield StoredModel(_repo(folder), begun[0], begun, "hub")


def _from_ollama() -> Iterator[StoredModel]:
    for name in installed(store()):
        try:
            path = find_ollama_model(name)
        except SourceError:
            continue
        yield StoredModel(f"ollama:{name}", path, (path,), "ollama")


def _hub_folders() -> list[Path]:
    try:
        return sorted(hub_cache().glob("models--*"))
    except OSError:
        return []


def _repo(folder: Path) -> str:
    return folder.name.removeprefix("models--").replace("--", "/")


def _snapshot(folder: Path) -> list[Path]:
    try:
        commit = (folder / "refs" / "main").read_text("ascii").strip()
        return sorted((folder / "snapshots" / commit).rglob("*.gguf")) if commit else []
    except (OSError, ValueError):
        return []


def _remove_file(path: Path) -> None:
    """Delete a file of a snapshot and, if it is a link into the cache, its target."""
    if path.is_symlink():
        target = path.resolve()
        path.unlink(missing_ok=True)
        if target.is_relative_to(hub_cache().resolve()):
            target.unlink(missing_ok=True)
        return
    path.unlink(missing_ok=True)
