"""Models at a URL (llama-server's `--model-url`), and those of the hub that have a short name."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llamado.gguf.errors import SourceError
from llamado.gguf.header import Header
from llamado.gguf.report import Progress, Warn
from llamado.gguf.sources.access import HUB, hub_access, offline
from llamado.gguf.sources.catalogue import LargeModel

if TYPE_CHECKING:
    import httpx

    from llamado.gguf.sources.header import Check


def url_target(url: str, folder: Path) -> Path:
    """Where the file at `url` is kept in `folder`. Raises SourceError for what is no URL.

    The name begins with the end of the URL and holds a digest of all of it: two sites may use the same name.
    """
    import httpx

    try:
        name = httpx.URL(url).path.rpartition("/")[2]
    except httpx.InvalidURL as error:
        raise SourceError(f"'{url}' is no URL: {error}") from None
    stem = re.sub("[^A-Za-z0-9._-]", "_", name.removesuffix(".gguf")).strip(".") or "model"
    return folder / f"{stem[:100]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}.gguf"


def large_folder() -> Path:
    """The folder for the large models with a short name: `$LLAMADO_MODELS` or `~/.models`."""
    return Path(os.environ.get("LLAMADO_MODELS") or "~/.models").expanduser()


class UrlModel:
    """The file at `url`, kept as `target`; `variable` names the folder for it, `large` is what the hub has there."""

    def __init__(
        self, url: str, target: Path, variable: str = "LLAMADO_CACHE", large: LargeModel | None = None
    ) -> None:
        self.url, self.target = url, target
        self._variable, self._large = variable, large

    @classmethod
    def of_large(cls, model: LargeModel) -> UrlModel:
        """A model with a short name."""
        url = f"{(hub_access()[0] or HUB).rstrip('/')}/{model.repo}/resolve/main/{model.file_name}"
        return cls(url, large_folder() / model.file_name, "LLAMADO_MODELS", model)

    def header(self, *, progress: Progress | None, warn: Warn) -> Header:
        """The header of the file on the server. Raises SourceError, and GgufError where there is no GGUF file."""
        with self._client() as client:
            return self._header(client)

    def fetch(self, *, progress: Progress | None, warn: Warn, check: Check | None = None) -> Path:
        """Path of the file, fetched unless it is there. `check` sees its header first.

        Raises `SourceError`, and what `check` raises.
        """
        from llamado.gguf.sources.fetch import check_space, disk_error, download, locked

        target = self.target
        if target.is_file():
            return target
        client = self._client()
        with client:
            header = None
            if check is not None:
                header = self._header(client)
                check(header)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise disk_error(error, target.parent, self._variable) from error
            with locked(target, warn):
                if not target.is_file():  # another process may have fetched it while this one waited
                    part = target.with_name(target.name + ".part")
                    if header is not None:
                        had = part.stat().st_size if part.is_file() else 0
                        check_space(target.parent, header.file_bytes - had, self._variable)
                    digest = self._sha256(client) if self._large is not None else None
                    download(client, self.url, target, sha256=digest, progress=progress, variable=self._variable)
        return target

    def _client(self) -> httpx.Client:
        import httpx

        from llamado.gguf.sources.fetch import shown

        if offline():
            raise SourceError(f"{self.target} is not there, and --offline forbids to fetch {shown(self.url)}")
        token = hub_access()[1] if self._large is not None else None
        # Sent to the hub alone: httpx drops it where a redirect leads elsewhere.
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(follow_redirects=True, timeout=30, headers=headers)

    def _header(self, client: httpx.Client) -> Header:
        from llamado.gguf.sources.fetch import shown
        from llamado.gguf.sources.header import fetch_header

        header = fetch_header(client, self.url, shown(self.url))
        return header if self._large is None else replace(header, others=_others(client, self._large))

    def _sha256(self, client: httpx.Client) -> str | None:
        """What the hub says the file's SHA-256 is, if it says so."""
        import httpx

        with suppress(httpx.HTTPError):
            # The hub's own answer has it; the store that it leads to has not.
            tag = client.head(self.url, follow_redirects=False).headers.get("x-linked-etag", "").strip('"')
            if re.fullmatch("[0-9a-f]{64}", tag):
                return str(tag)
        return None


def _others(client: httpx.Client, model: LargeModel) -> dict[str, int]:
    """Other quantisations of a model, and their bytes; none where the hub does not say."""
    import httpx

    from llamado.gguf.sources.hub import model_sizes

    endpoint = hub_access()[0] or HUB
    try:
        found = client.get(f"{endpoint.rstrip('/')}/api/models/{model.repo}", params={"blobs": "true"}).json()
        sizes = {str(one["rfilename"]): int(one.get("size") or 0) for one in found["siblings"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return {}
    return model_sizes(model.repo, sizes, model.file_name)
