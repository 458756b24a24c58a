"""HTTP downloads: resumable, verified, renamed into place atomically, one process at a time."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx

from llamado.gguf.errors import SourceError
from llamado.gguf.pages import STEP, write_in_steps
from llamado.gguf.report import Progress, Warn
from llamado.numerals import whole_number
from llamado.outgoing import limits

if sys.platform != "win32":
    import fcntl

CACHE = "LLAMADO_CACHE"
CHUNK = 1 << 20
ATTEMPTS = 5  # in a row without a new byte
PAUSE = 0.5  # seconds before the second attempt; doubled each time
RETRIED = {408, 425, 429, 500, 502, 503, 504}


def display_url(url: httpx.URL | str) -> str:
    """Return a URL without user name, password, query and fragment, for messages."""
    return str(httpx.URL(url).copy_with(username=None, password=None, query=None, fragment=None))


def download(
    client: httpx.Client,
    url: httpx.URL | str,
    target: Path,
    *,
    sha256: str | None = None,
    min_bytes: int = 0,
    max_bytes: int | None = None,
    progress: Progress | None = None,
    pause: float | None = None,
    variable: str = CACHE,
) -> None:
    """Fetch `url` into `target`, resuming from its `.part` file if a previous download was interrupted.

    `variable` is the environment variable that sets the folder, for error messages. A broken connection is retried,
    first after `pause` seconds, as long as bytes keep arriving. The file must have `min_bytes` to `max_bytes`; without
    a maximum the server must announce the size. Raises `SourceError` if the server refuses, the network fails, the disk
    is full, or the size or `sha256` does not match.
    """
    part = target.with_name(target.name + ".part")
    pause = PAUSE if pause is None else pause
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _fetch_rest(client, url, part, min_bytes, max_bytes, progress)
            break
        except (httpx.TransportError, Incomplete) as error:
            gained = part.exists() and part.stat().st_size > before
            failures = 1 if gained else failures + 1
            if failures >= ATTEMPTS:
                raise SourceError(
                    f"cannot fetch {display_url(url)}: {error or type(error).__name__}; check the network (or proxy) "
                    "and run the same command again, it resumes the download"
                ) from error
            time.sleep(pause * 2 ** (failures - 1))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SourceError(f"cannot fetch {display_url(url)}: {error or type(error).__name__}") from error
        except OSError as error:
            raise disk_error(error, part, variable) from error
    put_in_place(part, target, sha256, display_url(url), variable)


def put_in_place(part: Path, target: Path, sha256: str | None, source: str, variable: str = CACHE) -> None:
    """Rename a fetched file to `target`; delete it and raise `SourceError` if its SHA-256 differs."""
    try:
        if sha256 is not None and file_sha256(part) != sha256.lower():
            part.unlink()
            raise SourceError(
                f"the file from {source} is damaged (its SHA-256 does not match the index) and was deleted; "
                "try again, or use another index"
            )
        os.replace(part, target)
    except OSError as error:
        raise disk_error(error, target, variable) from error


class Incomplete(Exception):
    """A response ended early or requested a retry."""


def _fetch_rest(
    client: httpx.Client,
    url: httpx.URL | str,
    part: Path,
    min_bytes: int,
    max_bytes: int | None,
    progress: Progress | None,
) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    with client.stream("GET", url, headers=headers, extensions=limits(math.inf, math.inf)) as response:
        if have and response.status_code == 416:
            # Either the file is complete, or it changed on the server.
            total = response.headers.get("content-range", "").rpartition("/")[2]
            if total == str(have):
                return
            part.unlink()
            raise Incomplete("the partial file does not match the file on the server and is fetched again")
        if response.status_code in RETRIED:
            raise Incomplete(f"the server answers {response.status_code} {response.reason_phrase}")
        if response.is_error:
            raise SourceError(
                f"cannot fetch {display_url(url)}: the server answers {response.status_code} {response.reason_phrase}"
            )
        resumed = response.status_code == 206 and response.headers.get("content-range", "").startswith(f"bytes {have}-")
        if not resumed:
            have = 0  # the server ignores ranges
        length = whole_number(response.headers.get("content-length", ""))
        total_bytes = have + length if length else 0
        if max_bytes is None and not total_bytes:
            raise SourceError(f"cannot fetch {display_url(url)}: the server does not announce the size of the file")
        most = total_bytes if max_bytes is None else max_bytes
        if total_bytes > most:
            raise _too_long(url, most, f"the server announces {total_bytes}")
        with open(part, "ab" if resumed else "wb", buffering=STEP) as stream:
            # Write chunks as they arrive, so that they are kept if the connection breaks.
            for chunk in response.iter_bytes():
                have += len(chunk)
                if have > most:
                    break
                write_in_steps(stream, memoryview(chunk))
                if progress is not None:
                    progress(have, total_bytes)
        if have > most:
            part.unlink()
            raise _too_long(url, most, "the server sends more")
        if have < max(total_bytes, min_bytes):
            raise Incomplete(f"the connection ended after {have} of {max(total_bytes, min_bytes)} bytes")


def _too_long(url: httpx.URL | str, most: int, why: str) -> SourceError:
    return SourceError(f"cannot fetch {display_url(url)}: the file should have at most {most} bytes, and {why}")


def disk_error(error: OSError, path: Path, variable: str = CACHE) -> SourceError:
    """Return the `SourceError` for a failure to write `path`, in the folder that `variable` sets."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SourceError(
            f"the disk that holds {path.parent} is full; free some space or set {variable} to a folder elsewhere, "
            "then run the same command again"
        )
    return SourceError(f"cannot write {path}: {error.strerror or error}; set {variable} to a folder you may write to")


def check_space(folder: Path, needed: int, variable: str = CACHE) -> None:
    """Raise `SourceError` if fewer than `needed` bytes are free on the disk of `folder`."""
    stats = os.statvfs(folder) if hasattr(os, "statvfs") else None
    if stats is not None and stats.f_bavail * stats.f_frsize < needed:
        raise SourceError(
            f"{folder} has {stats.f_bavail * stats.f_frsize / 1e6:.0f} MB free and {needed / 1e6:.0f} MB are needed; "
            f"free some space or set {variable} to a folder elsewhere"
        )


def file_sha256(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def locked(target: Path, warn: Warn) -> Iterator[None]:
    """Hold the lock for making `target`; other processes wait for it."""
    lock = target.with_name(target.name + ".lock")
    try:
        stream: IO[bytes] = open(lock, "ab")  # noqa: SIM115 (open as long as the lock is held)
    except OSError as error:
        raise disk_error(error, lock) from error
    with stream:
        if sys.platform != "win32":
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                warn(f"another process is fetching {target.name}; waiting for it")
                fcntl.flock(stream, fcntl.LOCK_EX)
        # The lock is released with the open file, also if the process dies. The empty lock file stays: if it were
        # deleted, a process waiting on the deleted file and one that creates a new file could both proceed.
        yield
