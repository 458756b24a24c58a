"""Models that are on this machine: what was fetched (ours, the Hugging Face hub's cache), and what Ollama has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llamado.gguf.errors import SourceError
from llamado.gguf.shards import shard_names
from llamado.gguf.sources.catalogue import CATALOGUE, LARGE
from llamado.gguf.sources.ollama import find_ollama_model, installed, store
from llamado.gguf.sources.resolve import cache_dir
from llamado.gguf.sources.urls import large_folder

# Files that go along with a model (common/preset.cpp, b11434).
_DRAFTS = ("mtp-", "dspark-", "dflash-")
_QUANT = re.compile(r"[-.]([A-Z0-9_]+)$", re.IGNORECASE)
_BEGUN = (".part", ".unpacking", ".incomplete")


@dataclass(frozen=True)
class StoredModel:
    """A model, or what is there of one that is not fetched to its end."""

    name: str
    """What the router calls it, and `-hf` takes of a hub's model."""
    path: Path
    """Its file, of a split model the first."""
    files: tuple[Path, ...]
    """All of its files, those that are fetched in part as well."""
    source: str
    """cache (ours), hub, ollama, or folder."""
    size_due: int | None = None
    """Bytes of the whole file, where they are known."""

    @property
    def spec(self) -> str:
        """What `-m` takes, where that is a name."""
        return f"hf:{self.name}" if self.source == "hub" else self.name

    @property
    def argument(self) -> str:
        """What `-m` takes: a name that fetches nothing, or the path."""
        named = self.source in ("hub", "ollama") or self.name in CATALOGUE or self.name in LARGE
        return self.spec if named else str(self.path)

    @property
    def whole(self) -> bool:
        """Whether it is there to its end."""
        if not self.path.is_file() or any(_begun(file) for file in self.files):
            return False
        return self.size_due is None or self.path.stat().st_size == self.size_due

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(stat.st_size for stat in self._stats())

    @property
    def used(self) -> float:
        """When it was read or written last, in seconds since 1970, as far as the file system says."""
        return max((max(stat.st_atime, stat.st_mtime) for stat in self._stats()), default=0.0)

    @property
    def removable(self) -> bool:
        """Whether it was fetched by us."""
        return self.source in ("cache", "hub")

    def _stats(self) -> Iterator[os.stat_result]:
        for file in self.files:
            try:
                yield file.stat()
            except OSError:
                continue


def stored_models() -> list[StoredModel]:
    """All that are here, by name."""
    found = [*_ours(), *_of_the_hub(), *_of_ollama()]
    return sorted(found, key=lambda model: model.name)


def find_stored(name: str) -> StoredModel:
    """The model of a name as `stored_models` gives it, or of its file's. Raises SourceError for none, or several."""
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
            f"no model {name!r} is here" + (f"; there are {there}" if there else "; llamado pull fetches")
        )
    raise SourceError(f"which {name!r}? There are {', '.join(model.name for model in found)}")


def file_of(name: str) -> Path:
    """The file of a model that is here, by its path or its name. Raises SourceError, also where it is to be fetched."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        found = find_stored(name)
    except SourceError:
        found = None
    if found is not None and found.whole:
        return found.path
    if found is not None or name in CATALOGUE or name in LARGE:
        raise SourceError(f"{name} is not here yet: llamado pull {name} fetches it")
    raise SourceError(f"{name}: there is no such file; llamado list shows the models that are here")


def parts_of(path: Path) -> tuple[Path, ...]:
    """A model's file, and where it is the first of a split one the others."""
    return tuple(path.parent / part for part in shard_names(path.name) or [path.name])


def is_model(name: str) -> bool:
    """Whether a file of that name is a model, and none that goes along with one."""
    return name.endswith(".gguf") and "mmproj" not in name and not name.startswith(_DRAFTS)


def models_in(folder: str) -> dict[str, Path]:
    """Models of a folder by name: its GGUF files, and sub-folders of which each holds one model, maybe in parts."""
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
    """The folders that models are fetched to, as far as they are there: ours, and the Hugging Face hub's."""
    return [folder for folder in (cache_dir() / "models", large_folder(), hub_cache()) if folder.is_dir()]


def hub_cache() -> Path:
    """The Hugging Face hub's cache, by the environment names its library and llama.cpp read."""
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
    """Files in the hub's cache by `user/model:QUANT`; of a split model the first part, if all are there."""
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


def remove(model: StoredModel) -> int:
    """Delete a model's files, and return how many bytes that were. Raises SourceError for what we did not fetch."""
    if not model.removable:
        raise SourceError(f"{model.name} is not from our cache: {model.path} is left alone")
    size = model.size
    for file in model.files:
        try:
            _remove_file(file)
        except OSError as error:
            raise SourceError(f"cannot delete {file}: {error.strerror or error}") from None
    return size


def _begun(path: Path) -> bool:
    return path.suffix in _BEGUN


def _stem(name: str) -> str:
    return re.sub(r"-\d{5}-of-\d{5}$", "", name.removesuffix(".gguf"))


def _with_begun(files: Iterable[Path]) -> tuple[Path, ...]:
    """Files that are there, and those that were begun under their names."""
    all_files = [other for file in files for other in (file, *(file.with_name(file.name + end) for end in _BEGUN))]
    return tuple(file for file in all_files if file.is_file())


def _ours() -> Iterator[StoredModel]:
    """Those of a name, and those of a URL."""
    models = cache_dir() / "models"
    seen: set[Path] = set()
    for name, entry in CATALOGUE.items():
        path = models / entry.file_name
        wheels = [models / f"{wheel.project}-{wheel.version}.whl" for wheel in entry.wheels]
        files = _with_begun([path, *wheels])
        seen |= {path, *files}
        if files:
            yield StoredModel(name, path, files, "cache", entry.size)
    for name, large in LARGE.items():
        path = large_folder() / large.file_name
        files = _with_begun(parts_of(path))
        if files:
            yield StoredModel(name, path, files, "cache")
    for path in sorted({_without_end(file) for file in _folder(models)} - seen):
        parts = shard_names(path.name)
        if path.suffix == ".gguf" and (parts is None or parts[0] == path.name):
            files = _with_begun(parts_of(path))
            if files:
                yield StoredModel(path.name.removesuffix(".gguf"), path, files, "cache")


def _without_end(path: Path) -> Path:
    return path.with_suffix("") if _begun(path) else path


def _folder(path: Path) -> list[Path]:
    try:
        return [file for file in path.iterdir() if file.is_file()]
    except OSError:
        return []


def _of_the_hub() -> Iterator[StoredModel]:
    whole = hub_files()
    for name, path in whole.items():
        yield StoredModel(name, path, parts_of(path), "hub")
    for folder in _hub_folders():
        for path in _snapshot(folder):
            parts = parts_of(path)
            if parts[0] == path and path not in whole.values() and is_model(path.name) and "imatrix" not in path.name:
                yield StoredModel(_repo(folder), path, tuple(part for part in parts if part.exists()), "hub")
        # What was begun does not say of which file it is.
        begun = tuple(file for file in _folder(folder / "blobs") if _begun(file))
        if begun:
            yield StoredModel(_repo(folder), begun[0], begun, "hub")


def _of_ollama() -> Iterator[StoredModel]:
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
    """A file of a snapshot and, where it is a link into the cache, what it leads to."""
    if path.is_symlink():
        target = path.resolve()
        path.unlink(missing_ok=True)
        if target.is_relative_to(hub_cache().resolve()):
            target.unlink(missing_ok=True)
        return
    path.unlink(missing_ok=True)
