"""Models at a URL (llama-server's `--model-url`), and hub models with a short name."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llamado.gguf.errors import SourceError
from llamado.gguf.header import Header, merge_headers
from llamado.gguf.report import Progress, Warn
from llamado.gguf.shards import shard_names
from llamado.gguf.sources.access import HUB, hub_access, offline
from llamado.gguf.sources.catalog import LargeModel

if TYPE_CHECKING:
    import httpx

    from llamado.gguf.sources.header import Check


def url_target(url: str, folder: Path) -> Path:
    """Return the path in `folder` for the file at `url`; of a split model, that of the first part.

    The name starts with the end of the URL and contains a digest of all of it, because two sites may use the same name.
    Raises SourceError if `url` is invalid, or is a part of a split model other than the first.
    """
    import httpx

    try:
        name = httpx.URL(url).path.rpartition("/")[2]
    except httpx.InvalidURL as error:
        raise SourceError(f"'{url}' is no URL: {error}") from None
    names, end = shard_names(name), ".gguf"
    if names is not None:
        end = names[0][-len("-00001-of-00001.gguf") :]
        if name != names[0]:
            raise SourceError(f"{name} is one of {len(names)} parts of a model; give the URL of the first, {names[0]}")
    stem = re.sub("[^A-Za-z0-9._-]", "_", name.removesuffix(end)).strip(".") or "model"
    return folder / f"{stem[:100]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}{end}"


def large_folder() -> Path:
    """Return the folder for large models with a short name: `$LLAMADO_MODELS` or `~/.models`."""
    return Path(os.environ.get("LLAMADO_MODELS") or "~/.models").expanduser()


_PADDING = 1 << 20  # bytes that a file may have after its last tensor


class UrlModel:
    """The file at `url`, stored as `target`.

    `variable` is the environment variable that sets its folder; `large` is the catalog entry, if it is a hub model. If
    `url` is the first part of a split model, the other parts are fetched from and stored beside it.
    """

    def __init__(
        self, url: str, target: Path, variable: str = "LLAMADO_CACHE", large: LargeModel | None = None
    ) -> None:
        self.url, self.target = url, target
        self._variable, self._large = variable, large
        names = shard_names(target.name) or [target.name]
        self._parts = {target.with_name(name): _part_url(url, i, len(names)) for i, name in enumerate(names)}

    @classmethod
    def of_large(cls, model: LargeModel) -> UrlModel:
        """Return a model with a short name."""
        url = f"{(hub_access()[0] or HUB).rstrip('/')}/{model.repo}/resolve/main/{model.file_name}"
        return cls(url, large_folder() / model.file_name, "LLAMADO_MODELS", model)

    @property
    def is_here(self) -> bool:
        """Return True if all its files are fetched."""
        return all(part.is_file() for part in self._parts)

    def header(self, *, progress: Progress | None, warn: Warn) -> Header:
        """Return the header of the files on the server. Raises SourceError, or GgufError if they are not GGUF."""
        with self._client() as client:
            return self._merge_headers(client, self._headers(client))

    def fetch(self, *, progress: Progress | None, warn: Warn, check: Check | None = None) -> Path:
        """Return the path of the (first) file; fetch all files if missing. `check` receives the header first.

        Raises `SourceError`, and the errors of `check`.
        """
        from llamado.gguf.sources.fetch import check_space, disk_error, locked

        target = self.target
        if self.is_here:
            return target
        client = self._client()
        with client:
            headers: list[Header] = []
            if check is not None:
                headers = self._headers(client)
                check(self._merge_headers(client, headers))
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise disk_error(error, target.parent, self._variable) from error
            with locked(target, warn):
                if not self.is_here:  # another process may have fetched it while this one waited
                    n_bytes = sum(header.file_bytes for header in headers)
                    check_space(target.parent, n_bytes - self._bytes_present(), self._variable)
                    self._download(client, progress, [header.file_bytes for header in headers])
        return target

    def _bytes_present(self) -> int:
        """Return the bytes fetched by earlier runs."""
        files = [file for part in self._parts for file in (part, part.with_name(part.name + ".part"))]
        return sum(file.stat().st_size for file in files if file.is_file())

    def _download(self, client: httpx.Client, progress: Progress | None, sizes: list[int]) -> None:
        """Fetch the missing files. `sizes` are the bytes of each according to its header; [] if unknown."""
        from llamado.gguf.sources.fetch import download

        before = 0
        for i, (part, url) in enumerate(self._parts.items()):
            if not part.is_file():
                download(
                    client,
                    url,
                    part,
                    sha256=self._sha256(client, url),
                    min_bytes=sizes[i] if sizes else 0,
                    max_bytes=sizes[i] + _PADDING if sizes else None,
                    progress=_offset_progress(progress, before, sum(sizes)) if progress is not None else None,
                    variable=self._variable,
                )
            before += part.stat().st_size

    def _client(self) -> httpx.Client:
        from llamado.gguf.sources.fetch import display_url
        from llamado.outgoing import open_client

        if offline():
            raise SourceError(f"{self.target} is not fetched, and --offline forbids fetching {display_url(self.url)}")
        token = hub_access()[1] if self._large is not None else None
        # Sent to the hub only: httpx drops the header on a redirect to another host.
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return open_client(follow_redirects=True, timeout=30, headers=headers)

    def _headers(self, client: httpx.Client) -> list[Header]:
        from llamado.gguf.sources.fetch import display_url
        from llamado.gguf.sources.header import fetch_header

        return [fetch_header(client, url, display_url(url), shard) for shard, url in enumerate(self._parts.values())]

    def _merge_headers(self, client: httpx.Client, headers: list[Header]) -> Header:
        header = merge_headers(headers)
        return header if self._large is None else replace(header, alternatives=_alternatives(client, self._large))

    def _sha256(self, client: httpx.Client, url: str) -> str | None:
        """Return the file's SHA-256 given by the URL (`#sha256=…`) or the hub; None if neither has it."""
        import httpx

        stated = httpx.URL(url).fragment.partition("sha256=")[2]
        if stated:
            if not re.fullmatch("[0-9a-fA-F]{64}", stated) or len(self._parts) > 1:
                raise SourceError(f"#sha256={stated[:80]}: expected 64 hexadecimal digits, and a model of one file")
            return stated
        with suppress(httpx.HTTPError):
            # Only the hub's own response has it; the storage that it redirects to does not.
            tag = client.head(url, follow_redirects=False).headers.get("x-linked-etag", "").strip('"')
            if re.fullmatch("[0-9a-f]{64}", tag):
                return str(tag)
        return None


def _part_url(url: str, number: int, count: int) -> str:
    """Return the URL of part `number` of a split model; `url` is that of the first part."""
    return url if count == 1 else url.replace(f"-00001-of-{count:05d}.gguf", f"-{number + 1:05d}-of-{count:05d}.gguf")


def _offset_progress(progress: Progress, before: int, n_bytes: int) -> Progress:
    """Return a callback that reports progress of one file as a share of all files."""
    return lambda done, total: progress(before + done, max(n_bytes, before + total if total else 0))


def _alternatives(client: httpx.Client, model: LargeModel) -> dict[str, int]:
    """Return other quantizations of a model and their sizes in bytes; empty if the hub does not list them."""
    import httpx

    from llamado.gguf.sources.hub import listed_files, model_sizes

    endpoint = hub_access()[0] or HUB
    try:
        sizes = listed_files(client, endpoint, model.repo)
    except (httpx.HTTPError, ValueError):
        return {}
    return model_sizes(model.repo, sizes, model.file_name)
