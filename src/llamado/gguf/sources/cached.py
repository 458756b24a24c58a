"""Models that are on this machine already, by the names that fetch nothing."""

from __future__ import annotations

import os
from pathlib import Path

from llamado.gguf.sources.catalogue import CATALOGUE, LARGE
from llamado.gguf.sources.ollama import installed, store
from llamado.gguf.sources.resolve import cache_dir
from llamado.gguf.sources.urls import large_folder


def cached_models() -> list[str]:
    """What `-m` takes for models that were fetched: short names, repositories of the hub, Ollama's models, paths."""
    models, large = cache_dir() / "models", large_folder()
    names = [name for name, one in CATALOGUE.items() if one.is_at(models / one.file_name)]
    names += [name for name, one in LARGE.items() if (large / one.file_name).is_file()]
    named = {CATALOGUE[name].file_name if name in CATALOGUE else LARGE[name].file_name for name in names}
    paths = [path for folder in (models, large) if folder.is_dir() for path in sorted(folder.glob("*.gguf"))]
    return [
        *names,
        *(f"ollama:{name}" for name in installed(store())),
        *(f"hf:{repo}" for repo in _repositories()),
        *(str(path) for path in paths if path.name not in named),
    ]


def _repositories() -> list[str]:
    """Repositories in the hub's cache that hold a model; its layout is documented."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    found = [folder for folder in sorted(hub.glob("models--*")) if any(folder.glob("snapshots/*/*.gguf"))]
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in found]
