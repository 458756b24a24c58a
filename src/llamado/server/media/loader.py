"""Pictures and sounds of requests: read, decoded and prepared for the model's encoders in threads, within limits."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from llamado.media.chunks import chunks_of
from llamado.media.encoded import read_encoded
from llamado.media.errors import MediaError
from llamado.server.errors import ApiError, invalid, too_long
from llamado.server.media.parts import MediaReference, PreparedMedia, not_supported_here
from llamado.server.model import ServedModel
from llamado.server.switches import Switches

if TYPE_CHECKING:
    from llamado.outgoing import PublicReader

MOST_REMOTE_BYTES = 10 << 20
"""Bytes of a picture or sound behind a URL, as in llama-server."""
_REMOTE_SECONDS = 10.0
# Decoding a picture may take a second.
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="llamado-media")
MOST_FILE_BYTES = 64 << 20
"""Bytes of a file below `--media-path`."""
MOST_PREPARED = 1 << 30
"""Bytes of the encoders' inputs of all requests that are not answered yet."""


class MediaBudget:
    """The memory for the encoders' inputs of all requests. `most`: bytes held at once."""

    def __init__(self, most: int = MOST_PREPARED) -> None:
        self._most = most
        self.held = 0

    def reserve(self, n_bytes: int) -> None:
        """Reserve bytes. Raises ApiError (503) if other requests hold too many."""
        if self.held and self.held + n_bytes > self._most:
            raise ApiError("unavailable_error", "too many pictures and sounds at once", retry_after=5)
        self.held += n_bytes


class MediaHold:
    """The share of one request in the memory for encoders' inputs.

    As a context manager it releases the memory at the end, unless `keep` was called: then the response releases it.
    """

    def __init__(self, budget: MediaBudget) -> None:
        self._budget = budget
        self._n_bytes = 0
        self._is_kept = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_kept:
            self.release()

    def keep(self) -> Callable[[], None]:
        """Keep the memory beyond the end of the block, and return the function that releases it."""
        self._is_kept = True
        return self.release

    def add(self, prepared: PreparedMedia) -> None:
        """Reserve the memory of one picture or sound. Raises ApiError."""
        n_bytes = sum(chunk.input.nbytes for chunk in chunks_of(prepared.pieces))
        self._budget.reserve(n_bytes)
        self._n_bytes += n_bytes

    def release(self) -> None:
        """Return the memory to the budget. Idempotent."""
        held, self._n_bytes = self._n_bytes, 0
        self._budget.held -= held


class MediaLoader:
    """Loads the pictures and sounds of requests."""

    def __init__(self, switches: Switches) -> None:
        self._switches = switches
        self._root = None if switches.media_path is None else Path(switches.media_path)
        self._reader: PublicReader | None = None
        self.budget = MediaBudget()

    def hold(self) -> MediaHold:
        """Return the share of a new request in the memory, which is empty."""
        return MediaHold(self.budget)

    async def load(
        self, given: Sequence[MediaReference | bytes], served: ServedModel, hold: MediaHold
    ) -> list[PreparedMedia]:
        """Return the pictures and sounds, prepared; `hold` gets their memory. Raises ApiError and MediaError."""
        loop = asyncio.get_running_loop()
        found: list[PreparedMedia] = []
        n_tokens = 0
        # One after the other, so that a request with many pictures does not keep all others waiting.
        for one in given:
            read = partial(self._read, one)
            if isinstance(one, MediaReference) and _is_remote(one.text):
                data = await self._fetch(one)
                read = partial(bytes, data)
            prepared = await loop.run_in_executor(_threads, _prepare, read, served)
            hold.add(prepared)
            found.append(prepared)
            n_tokens += sum(chunk.n_tokens for chunk in chunks_of(prepared.pieces))
            if n_tokens >= served.info.n_ctx:
                raise too_long(n_tokens, served.info.n_ctx, at_least=True)
        return found

    def _read(self, given: MediaReference | bytes) -> bytes:
        """Return the bytes of a picture or sound that is in the body or on this machine; in a thread."""
        if isinstance(given, bytes):
            return given
        if given.text[:7].lower() == "file://":
            return self._read_file(given.text[7:], given.role)
        return read_encoded(given.text)

    def _read_file(self, name: str, role: str) -> bytes:
        if self._root is None:
            raise invalid("file:// URLs are not allowed unless --media-path is specified")
        parts = name.split("/")
        if not name.isprintable() or "\\" in name or ":" in name or {"", ".", ".."} & {*parts}:
            raise invalid(f"file path is not allowed: {name[:200]!r}; write it relative to --media-path")
        try:
            return _contents(self._root.resolve(strict=True), name)
        except FileNotFoundError:
            raise invalid(f"file does not exist or cannot be opened: {name[:200]}") from None
        except OSError as error:
            raise invalid(
                f"file does not exist or cannot be opened: {name[:200]}: {error.strerror or type(error).__name__}"
            ) from None

    async def _fetch(self, given: MediaReference) -> bytes:
        if not self._switches.media_url:
            raise invalid(
                f"this server does not fetch {given.role}s from URLs: send a data URI "
                f"(data:{given.role}/…;base64,…), or start it with --media-url"
            )
        import httpx

        from llamado.outgoing import PublicReader

        if self._reader is None:
            self._reader = PublicReader()
        try:
            return await self._reader.read(given.text, max_bytes=MOST_REMOTE_BYTES, max_seconds=_REMOTE_SECONDS)
        except httpx.HTTPError as error:
            raise invalid(f"Failed to download {given.role}: {error or type(error).__name__}") from None


def _is_remote(text: str) -> bool:
    return text[:8].lower().startswith(("http://", "https://"))


def _contents(root: Path, name: str) -> bytes:
    """Return the contents of a regular file below a folder. Raises OSError, and ApiError for one that is too large."""
    path = (root / name).resolve(strict=True)
    if not path.is_relative_to(root):
        raise invalid(f"file path is not allowed: {name[:200]!r}; it leads out of --media-path")
    # The path has no links any more; one that takes its place is not followed. A pipe does not block.
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise invalid(f"{name[:200]}: it is not a file")
    with open(file, "rb") as stream:
        data = stream.read(MOST_FILE_BYTES + 1)
    if len(data) > MOST_FILE_BYTES:
        raise invalid(f"{name[:200]}: it has more than {MOST_FILE_BYTES} bytes")
    return data


def _prepare(read: partial[bytes], served: ServedModel) -> PreparedMedia:
    """Decode a picture or sound and prepare it for its encoder; in a thread. Raises ApiError and MediaError."""
    # Imported late, because it loads the libraries that decode.
    from llamado.media.decode import decode, kind_of

    data = read()
    kind = kind_of(data)
    if served.media is None or kind not in served.media.rates:
        raise not_supported_here(kind.value)
    try:
        media = decode(data, kind, served.media.rates[kind])
        return PreparedMedia(served.media.prepare(media), len(media.data) / media.rate if media.rate else 0.0)
    except MemoryError:
        raise MediaError(f"the {kind.value} needs more memory than this server has") from None
