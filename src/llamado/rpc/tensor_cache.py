"""Weights kept on disk under the hash of their bytes, in llama.cpp's layout, so that either program finds the other's.

A file `%016x` of FNV-1a 64 in the folder `rpc` of llama.cpp's cache holds the bytes of one upload and nothing else.
Files appear whole (written aside, then renamed) and are checked against their name when they are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llamado.errors import LlamadoError
from llamado.rpc.hashing import BASIS, fnv1a, fnv1a_many
from llamado.rpc.regions import PAGE, Region

log = logging.getLogger("llamado.rpc.worker")

_CHUNK = 4 << 20
_UNFINISHED = ".unfinished"
_STALE = 24 * 3600
"""Seconds after which a file that was never finished is somebody's who is gone."""
_LEAST_MAPPED = 256 << 10
_READ_WRITE, _PRIVATE_FIXED = 0x3, 0x12  # PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED of Linux
_SPARE = 1 << 30
"""Bytes of the disk that are left free."""
_WAITING = 4096
"""Uploads that may wait to be written; more are not kept."""


class CacheError(LlamadoError):
    """The folder of the cache cannot be used."""


def cache_folder() -> Path:
    """Where llama.cpp keeps the tensors of RPC: under $LLAMA_CACHE, or the user's cache folder."""
    given = os.environ.get("LLAMA_CACHE")
    if given:
        return Path(given) / "rpc"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "llama.cpp" / "rpc"
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "llama.cpp" / "rpc"


class Wanted(NamedTuple):
    """Bytes that a client asks for by hash: to go to `offset` of a region, at most `room` of them."""

    hash: int
    region: Region
    offset: int
    room: int


class _Stamp(NamedTuple):
    """What changes when somebody writes to a file."""

    inode: int
    size: int
    modified: int


def _map(file: int, memory: memoryview, offset: int, size: int) -> int:
    """Puts the whole pages of a file of `size` bytes in the place of those at `offset` of a region, where both begin
    with a page: nothing is copied, and what is written later stays this process's. Tells how many bytes are there.

    As with any mapped file, a program that shortens an entry while it is used ends this process; entries are replaced
    by renaming, never in place, and ggml does not write to one it has found.
    """
    whole = size // PAGE * PAGE
    address = np.frombuffer(memory, np.uint8).ctypes.data + offset
    if sys.platform != "linux" or address % PAGE or whole < _LEAST_MAPPED or os.sysconf("SC_PAGE_SIZE") != PAGE:
        return 0
    mmap: Any = ctypes.CDLL(None).mmap
    mmap.restype = ctypes.c_void_p
    mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    return whole if mmap(address, whole, _READ_WRITE, _PRIVATE_FIXED, file, 0) == address else 0


class TensorCache:
    """The cache in one folder; any thread may use it."""

    def __init__(self, folder: Path) -> None:
        """Raises CacheError where the folder cannot be made or written."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"*{_UNFINISHED}"):
                with contextlib.suppress(OSError):
                    if time.time() - left.stat().st_mtime > _STALE:
                        left.unlink()
        except OSError as error:
            raise CacheError(
                f"the cache folder {folder} cannot be used: {error.strerror}; $LLAMA_CACHE names another"
            ) from None
        self._checked: dict[int, _Stamp] = {}
        self._queue: queue.Queue[tuple[Region, int, int, int | None] | None] = queue.Queue(_WAITING)
        self._writer: threading.Thread | None = None
        self._lock = threading.Lock()

    def path(self, hash: int) -> Path:
        """Where bytes of this hash are."""
        return self.folder / f"{hash:016x}"

    # --- using ------------------------------------------------------------------------------------------------------
    def load(self, wanted: Sequence[Wanted]) -> list[bool]:
        """Puts cached bytes where they are wanted; tells for each whether they are there now.

        An entry is checked when this process first uses it, several side by side, and again when the file has changed
        since. One that is wrong is deleted; its place then holds rubbish until the client has sent the right bytes.
        """
        found = [self._read(w) for w in wanted]
        unchecked = [i for i, stamp in enumerate(found) if stamp and self._checked.get(wanted[i].hash) != stamp]
        views = []
        for i in unchecked:
            stamp, memory = found[i], wanted[i].region.memory
            assert stamp is not None and memory is not None
            views.append(np.frombuffer(memory, np.uint8)[wanted[i].offset :][: stamp.size])
        for i, value in zip(unchecked, fnv1a_many(views), strict=True):
            stamp = found[i]
            if value == wanted[i].hash and stamp is not None:
                self._checked[value] = stamp
                continue
            log.warning(
                "cache entry %s is corrupt (its bytes have the hash %016x): deleted", self.path(wanted[i].hash), value
            )
            with contextlib.suppress(OSError):
                self.path(wanted[i].hash).unlink()
            found[i] = None
        return [stamp is not None for stamp in found]

    def _read(self, wanted: Wanted) -> _Stamp | None:
        """Reads an entry to its place; None where there is none, or none that fits."""
        memory = wanted.region.memory
        if memory is None:
            return None
        try:
            with open(self.path(wanted.hash), "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                size = status.st_size
                if not 0 < size <= wanted.room:
                    return None
                at = _map(file.fileno(), memory, wanted.offset, size)
                file.seek(at)
                while at < size:
                    n = file.readinto(memory[wanted.offset + at : wanted.offset + size])
                    if not n:
                        return None
                    at += n
        except OSError:
            return None
        return _Stamp(status.st_ino, size, status.st_mtime_ns)

    # --- keeping ----------------------------------------------------------------------------------------------------
    def keep(self, region: Region, offset: int, size: int, hash: int | None = None) -> None:
        """Writes bytes of a region to the cache, later; nothing happens where that is not possible.

        `hash` is what they were asked for by: if they are others by then, the client has moved on.
        """
        with self._lock:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="llamado-cache", daemon=True)
                self._writer.start()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((region, offset, size, hash))

    def flush(self) -> None:
        """Returns when everything that was to be kept is on disk."""
        self._queue.join()

    def close(self) -> None:
        """Writes what is still to be written, and ends."""
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

    def _write(self, region: Region, offset: int, size: int, hash: int | None) -> None:
        if shutil.disk_usage(self.folder).free < size + _SPARE:
            raise OSError(errno.ENOSPC, f"less than {_SPARE >> 20} MiB would be left on the disk")
        chunk = bytearray(min(_CHUNK, size))
        aside = self.folder / f"{os.getpid()}-{id(self):x}{_UNFINISHED}"  # only one thread writes
        try:
            with open(aside, "wb") as file:
                value = BASIS
                for at in range(0, size, _CHUNK):
                    n = min(_CHUNK, size - at)
                    memory = region.memory
                    if memory is None:  # its client is gone
                        os.unlink(aside)
                        return
                    # a copy: the client may write there while it is hashed
                    part = memoryview(chunk)[:n]
                    part[:] = memory[offset + at : offset + at + n]
                    del memory
                    value = fnv1a(np.frombuffer(part, np.uint8), value)
                    file.write(part)
                file.flush()
                status = os.fstat(file.fileno())
            if hash is not None and value != hash:
                os.unlink(aside)
                return
            os.replace(aside, self.path(value))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
        self._checked[value] = _Stamp(status.st_ino, status.st_size, status.st_mtime_ns)
