"""Weights from the worker's own model files, mapped so that the client need not send them.

A client names a weight by its SHA-256, its size and its name. The name only helps to find candidates. They are hashed
here, once per state of the file, and used if the hashes are equal. So a client gets only bytes whose hash it has
already, and only from the folders of models.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from llamado.gguf.errors import GgufError
from llamado.gguf.shards import Shard, release
from llamado.rpc import wire
from llamado.rpc.known_hashes import SHA256_DIGITS, KnownHashes
from llamado.rpc.worker.memory import Region
from llamado.rpc.worker.weights.mapping import map_file

log = logging.getLogger("llamado.rpc.worker.server")

_SCAN_INTERVAL = 5.0
"""Least seconds between two scans of the folders."""
_MOST_FILES = 10_000
_CHUNK = 1 << 20
_THREADS = 4


class PlacedWeight(NamedTuple):
    """A weight to fill in: `size` bytes at `offset` of a region, with this SHA-256."""

    region: Region
    offset: int
    size: int
    sha256: bytes
    name: bytes


class _Stamp(NamedTuple):
    """State of a file: it changes when the file is written or replaced."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Stamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class _ModelFile:
    """A GGUF file or one part of a split model: offsets, sizes and hashes of its weights."""

    def __init__(self, path: Path, stamp: _Stamp) -> None:
        """Raises GgufError or OSError."""
        self.path, self.stamp = path, stamp
        shard = Shard(path, 0)
        release(shard.memory)
        self.weights = {info.name.encode(): (info.offset, info.nbytes) for info in shard.tensors}
        self.hashes = KnownHashes([path], digits=SHA256_DIGITS)
        self.hashing: dict[bytes, Future[bytes | None]] = {}

    def open(self) -> int:
        """Open the file. Raises OSError if it has changed."""
        file = os.open(self.path, os.O_RDONLY)
        if _Stamp.of(os.fstat(file)) != self.stamp:
            os.close(file)
            raise OSError(f"{self.path} has changed")
        return file


class OwnFiles:
    """The models in some folders. Safe to use from several threads."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._files: dict[Path, _ModelFile | None] = {}
        self._stamps: dict[Path, _Stamp] = {}
        self._index: dict[tuple[bytes, int], list[_ModelFile]] = {}
        self._scanned = float("-inf")
        self._lock = threading.Lock()
        threads = max(1, min(_THREADS, os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(threads, "llamado-hash")

    def offer(self, offered: Sequence[wire.OfferedWeight]) -> list[bool]:
        """Return which weights may be here, by name and size, and start to hash those in the background."""
        with self._lock:
            self._scan()
            found = [self._index.get((one.name, one.size), []) for one in offered]
            for one, files in zip(offered, found, strict=True):
                for file in files:
                    self._hash(file, one.name)
        return [bool(files) for files in found]

    def bind(self, wanted: Sequence[PlacedWeight], is_gone: Callable[[], bool]) -> list[bool]:
        """Fill weights in, and return for each if it was. Stops once `is_gone` returns True."""
        with self._lock:
            files = [[*self._index.get((want.name, want.size), ())] for want in wanted]
        done = [not is_gone() and self._bind(want, among) for want, among in zip(wanted, files, strict=True)]
        for file in {id(file): file for among in files for file in among}.values():
            file.hashes.save()
        return done

    def close(self) -> None:
        """Cancel running hashes."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- files ------------------------------------------------------------------------------------------------------
    def _scan(self) -> None:
        """Update the files from the folders; called with the lock."""
        now = time.monotonic()
        if now - self._scanned < _SCAN_INTERVAL:
            return
        self._scanned = now
        stamps = dict(self._stamps_now())
        if stamps == self._stamps:
            return
        files: dict[Path, _ModelFile | None] = {}
        for path, stamp in stamps.items():
            if self._stamps.get(path) == stamp:
                files[path] = self._files[path]
                continue
            try:
                files[path] = _ModelFile(path, stamp)
            except (GgufError, OSError) as error:
                log.debug("%s has no weights to use: %s", path, error)
                files[path] = None
        self._files, self._stamps, self._index = files, stamps, {}
        for file in files.values():
            for name, (_, size) in file.weights.items() if file is not None else ():
                self._index.setdefault((name, size), []).append(file)  # type: ignore[arg-type]

    def _stamps_now(self) -> Iterator[tuple[Path, _Stamp]]:
        n = 0
        for folder in self.folders:
            for root, _, names in os.walk(folder):
                for name in names:
                    path = Path(root, name)
                    if path.suffix != ".gguf" or n >= _MOST_FILES:
                        continue
                    try:
                        status = path.stat()
                    except OSError:
                        continue
                    if stat.S_ISREG(status.st_mode):
                        n += 1
                        yield path, _Stamp.of(status)

    # --- hashes -----------------------------------------------------------------------------------------------------
    def _hash(self, file: _ModelFile, name: bytes) -> Future[bytes | None]:
        """Return the SHA-256 of a weight, None if the file has changed; called with the lock."""
        future = file.hashing.get(name)
        if future is None:
            known = file.hashes.get(name.decode())
            if known is not None:
                future = Future()
                future.set_result(known.to_bytes(wire.SHA256_BYTES, "big"))
            else:
                future = self._pool.submit(_digest, file, name)
            file.hashing[name] = future
        return future

    def _bind(self, want: PlacedWeight, among: Sequence[_ModelFile]) -> bool:
        for file in among:
            with self._lock:
                digest = self._hash(file, want.name)
            if digest.result() == want.sha256 and _fill(file, want):
                return True
        return False


def _digest(file: _ModelFile, name: bytes) -> bytes | None:
    """Return the SHA-256 of a weight. The file is read, not mapped, so that truncating it cannot end this process."""
    at, size = file.weights[name]
    digest, chunk = hashlib.sha256(), bytearray(min(size, _CHUNK))
    try:
        descriptor = file.open()
        try:
            while size:
                n = os.preadv(descriptor, [memoryview(chunk)[: min(size, _CHUNK)]], at)
                if not n:
                    return None
                digest.update(memoryview(chunk)[:n])
                at, size = at + n, size - n
        finally:
            os.close(descriptor)
    except OSError as error:
        log.warning("%s: %s", file.path, error)
        return None
    file.hashes[name.decode()] = int.from_bytes(digest.digest(), "big")
    return digest.digest()


def _fill(file: _ModelFile, want: PlacedWeight) -> bool:
    """Map the whole pages of a weight and copy the rest. After a failure the place has undefined content."""
    start, size = file.weights[want.name]
    memory = want.region.memory
    try:
        descriptor = file.open()
        try:
            if memory is None:
                return _copy(descriptor, start, want, 0, size)
            advice = "put new models beside it, under other names"
            first, end = map_file(descriptor, start, memory, want.offset, size, advice)
            return _copy(descriptor, start, want, 0, first) and _copy(descriptor, start, want, end, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        log.warning("%s: %s", file.path, error)
        return False


def _copy(file: int, start: int, want: PlacedWeight, at: int, end: int) -> bool:
    """Copy bytes `at` to `end` of a weight. Returns False if the file is too short."""
    while at < end:
        data = os.pread(file, min(_CHUNK, end - at), start + at)
        if not data:
            return False
        want.region.write(want.offset + at, data)
        at += len(data)
    return True
