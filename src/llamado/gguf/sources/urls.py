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
from llamado.gguf.header import Header, joined
from llamado.gguf.report import Progress, Warn
from llamado.gguf.shards import shard_names
from llamado.gguf.sources.access import HUB, hub_access, offline
from llamado.gguf.sources.catalogue import LargeModel

if TYPE_CHECKING:
    import httpx

    from llamado.gguf.sources.header import Check


def url_target(url: str, folder: Path) -> Path:
    """Where the file at `url` is kept in `folder`, the first of several where it is one of a split model.

    The name begins with the end of the URL and holds a digest of all of it: two sites may use the same name. Raises
    SourceError for what is no URL, and for another part of a split model than the first.
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
    """The folder for the large models with a short name: `$LLAMADO_MODELS` or `~/.models`."""
    return Path(os.environ.get("LLAMADO_MODELS") or "~/.models").expanduser()


_PADDING = 1 << 20  # bytes that a file may have after its last tensor


class UrlModel:
    """The file at `url`, kept as `target`; `variable` names the folder for it, `large` is what the hub has there.

    Where it is the first of a split model the others lie beside it, and are kept beside it.
    """

    def __init__(
        self, url: str, target: Path, variable: str = "LLAMADO_CACHE", large: LargeModel | None = None
    ) -> None:
        self.url, self.target = url, target
        self._variable, self._large = variable, large
        names = shard_names(target.name) or [target.name]
        self._parts = {target.with_name(name): _beside(url, i, len(names)) for i, name in enumerate(names)}

    @classmethod
    def of_large(cls, model: LargeModel) -> UrlModel:
        """A model with a short name."""
        url = f"{(hub_access()[0] or HUB).rstrip('/')}/{model.repo}/resolve/main/{model.file_name}"
        return cls(url, large_folder() / model.file_name, "LLAMADO_MODELS", model)

    @property
    def is_here(self) -> bool:
        """Whether all files of it were fetched."""
        return all(part.is_file() for part in self._parts)

    def header(self, *, progress: Progress | None, warn: Warn) -> Header:
        """The header of the files on the server. Raises SourceError, and GgufError where there is no GGUF file."""
        with self._client() as client:
            return self._joined(client, self._headers(client))

    def fetch(self, *, progress: Progress | None, warn: Warn, check: Check | None = None) -> Path:
        """Path of the (first) file, all of them fetched unless they are there. `check` sees the header first.

        Raises `SourceError`, and what `check` raises.
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
                check(self._joined(client, headers))
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise disk_error(error, target.parent, self._variable) from error
            with locked(target, warn):
                if not self.is_here:  # another process may have fetched it while this one waited
                    n_bytes = sum(header.file_bytes for header in headers)
                    check_space(target.parent, n_bytes - self._had(), self._variable)
                    self._download(client, progress, [header.file_bytes for header in headers])
        return target

    def _had(self) -> int:
        """Bytes that former runs have fetched."""
        files = [file for part in self._parts for file in (part, part.with_name(part.name + ".part"))]
        return sum(file.stat().st_size for file in files if file.is_file())

    def _download(self, client: httpx.Client, progress: Progress | None, sizes: list[int]) -> None:
        """Fetch all files that are not here. `sizes`: bytes of each according to its header; [] if that is unknown."""
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
                    progress=_beyond(progress, before, sum(sizes)) if progress is not None else None,
                    variable=self._variable,
                )
            before += part.stat().st_size

    def _client(self) -> httpx.Client:
        from llamado.gguf.sources.fetch import shown
        from llamado.outgoing import open_client

        if offline():
            raise SourceError(f"{self.target} is not there, and --offline forbids to fetch {shown(self.url)}")
        token = hub_access()[1] if self._large is not None else None
        # Sent to the hub alone: httpx drops it where a redirect leads elsewhere.
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return open_client(follow_redirects=True, timeout=30, headers=headers)

    def _headers(self, client: httpx.Client) -> list[Header]:
        from llamado.gguf.sources.fetch import shown
        from llamado.gguf.sources.header import fetch_header

        return [fetch_header(client, url, shown(url), shard) for shard, url in enumerate(self._parts.values())]

    def _joined(self, client: httpx.Client, headers: list[Header]) -> Header:
        header = joined(headers)
        return header if self._large is None else replace(header, others=_others(client, self._large))

    def _sha256(self, client: httpx.Client, url: str) -> str | None:
        """Return the file's SHA-256 as the URL has it (`#sha256=…`), or the hub; None if neither has."""
        import httpx

        stated = httpx.URL(url).fragment.partition("sha256=")[2]
        if stated:
            if not re.fullmatch("[0-9a-fA-F]{64}", stated) or len(self._parts) > 1:
                raise SourceError(f"#sha256={stated[:80]}: expected 64 hexadecimal digits, and a model of one file")
            return stated
        with suppress(httpx.HTTPError):
            # The hub's own answer has it; the store that it leads to has not.
            tag = client.head(url, follow_redirects=False).headers.get("x-linked-etag", "").strip('"')
            if re.fullmatch("[0-9a-f]{64}", tag):
                return str(tag)
        return None


def _beside(url: str, number: int, count: int) -> str:
    """The URL of a part of a split model of which `url` is the first's."""
    return url if count == 1 else url.replace(f"-00001-of-{count:05d}.gguf", f"-{number + 1:05d}-of-{count:05d}.gguf")


def _beyond(progress: Progress, before: int, n_bytes: int) -> Progress:
    """Reports what is done of one file as a share of all of them."""
    return lambda done, total: progress(before + done, max(n_bytes, before + total if total else 0))


def _others(client: httpx.Client, model: LargeModel) -> dict[str, int]:
    """Other quantisations of a model, and their bytes; none where the hub does not say."""
    import httpx

    from llamado.gguf.sources.hub import listed_files, model_sizes

    endpoint = hub_access()[0] or HUB
    try:
        sizes = listed_files(client, endpoint, model.repo)
    except (httpx.HTTPError, ValueError):
        return {}
    return model_sizes(model.repo, sizes, model.file_name)
