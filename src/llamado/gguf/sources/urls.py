"""Models at a URL (llama-server's `--model-url`)."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from llamado.gguf.errors import SourceError
from llamado.gguf.report import Progress, Warn

if TYPE_CHECKING:
    from llamado.gguf.sources.header import Check


def fetch_url_model(
    url: str, models_dir: Path, *, progress: Progress | None, warn: Warn, check: Check | None = None
) -> Path:
    """Path of the file at `url` in `models_dir`, fetched unless it is there. `check` sees its header first.

    Raises `SourceError`, and what `check` raises.

    The file's name begins with the end of the URL and holds a digest of all of it: two sites may use the same name.
    """
    import httpx

    from llamado.gguf.sources.fetch import disk_error, download, locked, shown
    from llamado.gguf.sources.header import fetch_header

    try:
        name = httpx.URL(url).path.rpartition("/")[2]
    except httpx.InvalidURL as error:
        raise SourceError(f"'{url}' is no URL: {error}") from None
    stem = re.sub("[^A-Za-z0-9._-]", "_", name.removesuffix(".gguf")).strip(".") or "model"
    target = models_dir / f"{stem[:100]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}.gguf"
    if target.is_file():
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, models_dir) from error
    with locked(target, warn):
        if not target.is_file():  # another process may have fetched it while this one waited
            with httpx.Client(follow_redirects=True, timeout=30) as client:
                if check is not None:
                    check(fetch_header(client, url, shown(url)))
                download(client, url, target, progress=progress)
    return target
