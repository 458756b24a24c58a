"""Tensor cache: uploaded weights on disk by the hash of their bytes, separate for each client.

The protocol's hash is FNV-1a 64, for which collisions are easy to make. So an entry is used only for the client that
uploaded it (see identity.py), for exactly as many bytes, and if they still have the SHA-256 in its trailer. An intact
entry is never replaced.

`<folder>/<client>/<%016x of the hash>-<bytes>` holds the bytes and a trailer. Files appear whole: they are written
under another name, then linked to theirs.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import queue
import shutil
import stat
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from llamado.devices.owned import foreign
from llamado.errors import LlamadoError
from llamado.gguf.sources.resolve import cache_dir
from llamado.rpc.hashing import BASIS, fnv1a
from llamado.rpc.worker.memory import Region
from llamado.rpc.worker.weights.mapping import map_file

log = logging.getLogger("llamado.rpc.worker.server")

_CHUNK = 4 << 20
_UNFINISHED = ".unfinished"
_STALE = 24 * 3600
"""Seconds after which an unfinished file is left over from a dead process."""
_SPARE = 1 << 30
"""Bytes of the disk to leave free."""
_WAITING = 4096
"""Most uploads in the queue; further ones are not cached."""
_TRAILER = struct.Struct("<16sQQ32s")
"""After an entry's bytes: a mark, their FNV-1a, their number, their SHA-256."""
_MARK = b"llamado tensor 1"
_CHECKS_AT_ONCE = 4
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


class CacheError(LlamadoError):
    """The cache folder cannot be used."""


def cache_folder() -> Path:
    """Return the cache folder: `rpc` in `$LLAMADO_CACHE`, by default the user's cache folder."""
    return cache_dir() / "rpc"


class HashedBytes(NamedTuple):
    """Bytes to load by hash: `size` bytes at `offset` of a region."""

    hash: int
    region: Region
    offset: int
    size: int


class _FileStamp(NamedTuple):
    """An entry on disk: the SHA-256 in its trailer, and the state of the file."""

    sha256: bytes
    inode: int
    modified: int


class TensorCache:
    """The cache in one folder. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        """Raises CacheError if the folder cannot be made or written, or if other users can write to it."""
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            reason = foreign(folder.stat())
            for left in folder.glob(f"*/*{_UNFINISHED}"):
                with contextlib.suppress(OSError):
                    if time.time() - left.stat().st_mtime > _STALE:
                        left.unlink()
        except OSError as error:
            reason = error.strerror or str(error)
        if reason is not None:
            raise CacheError(f"the cache folder {folder} cannot be used: {reason}; $LLAMADO_CACHE names another")
        self._checked: dict[Path, _FileStamp] = {}
        self._queue: queue.Queue[tuple[str, Region, int, int, int | None] | None] = queue.Queue(_WAITING)
        self._writer: threading.Thread | None = None
        self._lock = threading.Lock()

    def path(self, client: str, hash: int, size: int) -> Path:
        """Return the path of a client's entry."""
        return self.folder / client / f"{hash:016x}-{size}"

    # --- using ------------------------------------------------------------------------------------------------------
    def load(self, client: str, wanted: Sequence[HashedBytes]) -> list[bool]:
        """Load cached bytes into regions, and return for each if it was found.

        Entries are checked at their first use in this process, several in parallel, and again after a change of the
        file. A corrupt one is deleted; its region then has undefined content until the client has sent the bytes.
        """
        paths = [self.path(client, w.hash, w.size) for w in wanted]
        found = [self._read(path, w) for path, w in zip(paths, wanted, strict=True)]
        unchecked = [i for i, entry in enumerate(found) if entry and self._checked.get(paths[i]) != entry]

        def digest(i: int) -> bytes:
            memory = wanted[i].region.memory
            assert memory is not None
            return hashlib.sha256(memory[wanted[i].offset : wanted[i].offset + wanted[i].size]).digest()

        with ThreadPoolExecutor(_CHECKS_AT_ONCE) as pool:
            digests = [*pool.map(digest, unchecked)]
        for i, value in zip(unchecked, digests, strict=True):
            entry = found[i]
            assert entry is not None
            if value == entry.sha256:
                self._checked[paths[i]] = entry
            else:
                _drop(paths[i])
                found[i] = None
        return [entry is not None for entry in found]

    def _read(self, path: Path, wanted: HashedBytes) -> _FileStamp | None:
        """Read an entry into its region. Returns None if there is none."""
        memory = wanted.region.memory
        if memory is None:
            return None
        try:
            with _open(path) as file:
                entry = _entry(path, file, wanted.hash, wanted.size)
                if entry is None:
                    return None
                # Entries are replaced by renaming, never in place; ggml does not write to an existing one either.
                advice = "programs that write to a worker's cache must rename files"
                _, at = map_file(file.fileno(), 0, memory, wanted.offset, wanted.size, advice)
                file.seek(at)
                while at < wanted.size:
                    n = file.readinto(memory[wanted.offset + at : wanted.offset + wanted.size])  # type: ignore[attr-defined]
                    if not n:
                        return None
                    at += n
        except OSError:
            return None
        return entry

    # --- keeping ----------------------------------------------------------------------------------------------------
    def keep(self, client: str, region: Region, offset: int, size: int, hash: int | None = None) -> None:
        """Queue bytes of a region to be written to the cache. Dropped if the queue is full.

        `hash`: the hash of the request that missed. If the bytes do not match it, they are not cached.
        """
        with self._lock:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="llamado-cache", daemon=True)
                self._writer.start()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((client, region, offset, size, hash))

    def flush(self) -> None:
        """Wait until all queued bytes are on disk."""
        self._queue.join()

    def close(self) -> None:
        """Write all queued bytes and end the thread."""
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            self._queue.put(None)
            writer.join()

    def _write_all(self) -> None:
        while True:
            job = self._queue.get()
            try:
                if job is None:
                    return
                self._write(*job)
            except OSError as error:
                log.warning("a tensor was not cached in %s: %s", self.folder, error.strerror or error)
            except Exception:
                log.exception("a tensor was not cached")
            finally:
                self._queue.task_done()

    def _write(self, client: str, region: Region, offset: int, size: int, hash: int | None) -> None:
        if shutil.disk_usage(self.folder).free < size + _SPARE:
            raise OSError(errno.ENOSPC, f"less than {_SPARE >> 20} MiB would be left on the disk")
        folder = self.folder / client
        folder.mkdir(mode=0o700, exist_ok=True)
        aside = folder / f"{os.getpid()}-{id(self):x}{_UNFINISHED}"  # only one thread writes
        try:
            with open(aside, "wb") as file:
                written = self._copy(file, region, offset, size)
                if written is None or hash not in (None, written[0]):
                    return
                value, digest = written
                file.write(_TRAILER.pack(_MARK, value, size, digest))
                file.flush()
                status = os.fstat(file.fileno())
            path = self.path(client, value, size)
            entry = _FileStamp(digest, status.st_ino, status.st_mtime_ns)
            try:
                os.link(aside, path)
            except FileExistsError:
                kept = self._verified(path, value, size)
                if kept is not None:
                    if kept.sha256 != digest:
                        log.warning("%s: other bytes with the hash of an entry were not cached: %s", client, path.name)
                    return
                os.replace(aside, path)
            self._checked[path] = entry
        finally:
            with contextlib.suppress(OSError):
                os.unlink(aside)

    @staticmethod
    def _copy(file: BinaryIO, region: Region, offset: int, size: int) -> tuple[int, bytes] | None:
        """Write bytes of a region. Returns their FNV-1a and SHA-256, None if the region was freed."""
        value, digest = BASIS, hashlib.sha256()
        chunk = bytearray(min(_CHUNK, size))
        for at in range(0, size, _CHUNK):
            n = min(_CHUNK, size - at)
            memory = region.memory
            if memory is None:
                return None
            # a copy, since the client may write there meanwhile
            part = memoryview(chunk)[:n]
            part[:] = memory[offset + at : offset + at + n]
            del memory
            value = fnv1a(np.frombuffer(part, np.uint8), value)
            digest.update(part)
            file.write(part)
        return value, digest.digest()

    def _verified(self, path: Path, hash: int, size: int) -> _FileStamp | None:
        """Return an entry if its bytes are intact."""
        try:
            with _open(path) as file:
                entry = _entry(path, file, hash, size)
                if entry is None or self._checked.get(path) == entry:
                    return entry
                file.seek(0)
                digest = hashlib.sha256()
                for at in range(0, size, _CHUNK):
                    digest.update(file.read(min(_CHUNK, size - at)))
        except OSError:
            return None
        if digest.digest() != entry.sha256:
            _drop(path)
            return None
        self._checked[path] = entry
        return entry


def _open(path: Path) -> BinaryIO:
    return open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | _NO_LINKS))


def _entry(path: Path, file: BinaryIO, hash: int, size: int) -> _FileStamp | None:
    """Return the trailer of an open entry. Returns None and deletes the entry if it is invalid."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or (reason := foreign(status)) is not None:
        log.warning("cache entry %s: not used: %s", path, reason if stat.S_ISREG(status.st_mode) else "it is no file")
        return None
    digest = b""
    if status.st_size == size + _TRAILER.size:
        file.seek(size)
        trailer = file.read(_TRAILER.size)
        if len(trailer) == _TRAILER.size:
            *head, digest = _TRAILER.unpack(trailer)
            if head != [_MARK, hash, size]:
                digest = b""
    if not digest:
        _drop(path)
        return None
    return _FileStamp(digest, status.st_ino, status.st_mtime_ns)


def _drop(path: Path) -> None:
    log.warning("cache entry %s: corrupt, deleted", path)
    with contextlib.suppress(OSError):
        path.unlink()
