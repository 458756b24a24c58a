"""Fetching files over HTTP: resumed after an interruption, checked, put in place in one step, one process at a time."""

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
ATTEMPTS = 5  # in a row without a single new byte
PAUSE = 0.5  # seconds before the second; doubled each time
RETRIED = {408, 425, 429, 500, 502, 503, 504}


def shown(url: httpx.URL | str) -> str:
    """A URL without the user name, password and query, fit for a message."""
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
    """Fetch `url` into `target`, going on from `target`'s `.part` file where a former run was interrupted.

    `variable` names the folder, in errors. A connection that breaks is taken up again, at first after `pause` seconds,
    as long as bytes keep coming. The file has `min_bytes` to `max_bytes`; without a maximum the server must announce
    its size. Raises `SourceError` if the server refuses, the network fails, the disk is full, or the file has another
    size or `sha256`.
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
                    f"cannot fetch {shown(url)}: {error or type(error).__name__}; check the network (or proxy) and run "
                    "the same command again, it goes on where it stopped"
                ) from error
            time.sleep(pause * 2 ** (failures - 1))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SourceError(f"cannot fetch {shown(url)}: {error or type(error).__name__}") from error
        except OSError as error:
            raise disk_error(error, part, variable) from error
    put_in_place(part, target, sha256, shown(url), variable)


def put_in_place(part: Path, target: Path, sha256: str | None, source: str, variable: str = CACHE) -> None:
    """Give a fetched file its name; raises `SourceError`, and deletes it, when its SHA-256 is another."""
    try:
        if sha256 is not None and file_sha256(part) != sha256.lower():
            part.unlink()
            raise SourceError(
                f"what came from {source} is damaged (its SHA-256 is not the one the index gives) and was deleted; "
                "try again, or use another index"
            )
        os.replace(part, target)
    except OSError as error:
        raise disk_error(error, target, variable) from error


class Incomplete(Exception):
    """A response that ended early or that asks to be tried again."""


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
            # Nothing is left to send: the file is there in full, or it is not the same file any more.
            total = response.headers.get("content-range", "").rpartition("/")[2]
            if total == str(have):
                return
            part.unlink()
            raise Incomplete("the partial file did not fit the original and is fetched anew")
        if response.status_code in RETRIED:
            raise Incomplete(f"the server answers {response.status_code} {response.reason_phrase}")
        if response.is_error:
            raise SourceError(
                f"cannot fetch {shown(url)}: the server answers {response.status_code} {response.reason_phrase}"
            )
        resumed = response.status_code == 206 and response.headers.get("content-range", "").startswith(f"bytes {have}-")
        if not resumed:
            have = 0  # the server ignores ranges
        length = whole_number(response.headers.get("content-length", ""))
        total_bytes = have + length if length else 0
        if max_bytes is None and not total_bytes:
            raise SourceError(f"cannot fetch {shown(url)}: the server does not say how many bytes the file has")
        most = total_bytes if max_bytes is None else max_bytes
        if total_bytes > most:
            raise _too_long(url, most, f"the server announces {total_bytes}")
        with open(part, "ab" if resumed else "wb", buffering=STEP) as stream:
            # As they come in: what has come is kept when the connection breaks.
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
    return SourceError(f"cannot fetch {shown(url)}: the file should have at most {most} bytes, and {why}")


def disk_error(error: OSError, path: Path, variable: str = CACHE) -> SourceError:
    """The `SourceError` for a failure to write `path`, in a folder that `variable` names."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SourceError(
            f"the disk that holds {path.parent} is full; free some space or set {variable} to a folder elsewhere, "
            "then run the same command again"
        )
    return SourceError(f"cannot write {path}: {error.strerror or error}; set {variable} to a folder you may write to")


def check_space(folder: Path, needed: int, variable: str = CACHE) -> None:
    """Raise `SourceError` when fewer than `needed` bytes are free where `folder` is."""
    stats = os.statvfs(folder) if hasattr(os, "statvfs") else None
    if stats is not None and stats.f_bavail * stats.f_frsize < needed:
        raise SourceError(
            f"{folder} has {stats.f_bavail * stats.f_frsize / 1e6:.0f} MB free and {needed / 1e6:.0f} MB are needed; "
            f"free some space or set {variable} to a folder elsewhere"
        )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def locked(target: Path, warn: Warn) -> Iterator[None]:
    """Hold the right to make `target`; other processes that ask for it wait."""
    lock = target.with_name(target.name + ".lock")
    try:
        stream: IO[bytes] = open(lock, "ab")  # noqa: SIM115  (open as long as the lock is held)
    except OSError as error:
        raise disk_error(error, lock) from error
    with stream:
        if sys.platform != "win32":
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                warn(f"another process is fetching {target.name}; waiting for it")
                fcntl.flock(stream, fcntl.LOCK_EX)
        # The lock goes with the open file, also when the process dies. The empty lock file stays: deleting it would let
        # a process that waits on the deleted file and one that makes a new one both go ahead.
        yield
