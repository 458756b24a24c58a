"""Slot files: the tokens of a sequence and its state in the model's memory.

Little-endian. Each crc32 continues the one before it, so that parts of two files cannot be mixed:

| bytes | content |
|---|---|
| 8 | magic `llamados` |
| 4 | version: 1, with scales 2, with a tail 3, with snapshots 4 |
| 4 | number of tokens `n` |
| 4, 4 | types of K and V in the cache, ggml's numbers |
| 4 | number of layers |
| 4 | cells in a piece `m` |
| 8 | bytes of one cell in all layers that keep all tokens |
| 32 | fingerprint of the model |
| 4 | crc32 of everything before |
| 4, 4 n, 4 | with scales or a tail: number of adapters (0: none applies), their scales in float32, crc32 |
| 32, 4 | with a tail: SHA-256 of the memory's kind, crc32 |
| 4, 4 k, 4 | with snapshots: their number `k`, their token counts, ascending and less than n, crc32 |
| tail size for n tokens, 4 | with a tail: state of the other layers, crc32 |
| tail size for its tokens, 4 | for each snapshot: state of the other layers then, crc32 |
| 4 n, 4 | tokens, crc32 |
| for each `m` cells (the last piece: the rest) | for each layer that keeps all tokens K of these cells, then V; crc32 |

A file is written under a temporary name and renamed when it is complete. It is checked from end to end before a byte
of it is used: a truncated, damaged, too long or malicious file changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from llamado.engine.errors import SlotFileError, SlotNotSaved
from llamado.engine.forward.contract import CellKind, Cells, Scales
from llamado.models.memory import Memory

_MAGIC = b"llamados"
_VERSION, _VERSION_SCALES, _VERSION_TAIL, _VERSION_SNAPSHOTS = 1, 2, 3, 4
_HEAD = struct.Struct("<8s6IQ32s")
_CRC = struct.Struct("<I")
_COUNT = struct.Struct("<I")
_DIGEST = 32
# Pieces are read into memory as a whole; larger ones were not written by llamado.
_MOST_CELLS = 256
_MOST_SNAPSHOTS = 4096
_NONE: Mapping[int, Cells] = {}

Tokens = NDArray[np.int32]


class SlotFile(NamedTuple):
    """Result of saving or restoring a slot."""

    n_tokens: int
    n_bytes: int
    """Size of the file."""
    seconds: float


def write_slot(
    path: Path,
    kind: CellKind,
    tokens: Tokens,
    tail: Cells,
    pieces: Iterable[Cells],
    piece: int,
    snapshots: Mapping[int, Cells] = _NONE,
) -> int:
    """Write a file. `pieces` have `piece` cells each, the last one the rest. Returns the file's size.

    `tail`: of all tokens (see Memory.read_tail). `snapshots`: those of fewer tokens, by token count. Raises
    SlotNotSaved if the OS refuses, and any error of `pieces`; an existing file is unchanged then.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        try:
            with open(temporary, "xb") as file:
                _write(file, kind, tokens, tail, snapshots, pieces, piece)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            os.replace(temporary, path)
        except OSError as error:
            raise SlotNotSaved(f"{path.name}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return size


def _write(
    file: BinaryIO,
    kind: CellKind,
    tokens: Tokens,
    tail: Cells,
    snapshots: Mapping[int, Cells],
    pieces: Iterable[Cells],
    piece: int,
) -> None:
    crc = 0

    def put(data: bytes | memoryview) -> None:
        nonlocal crc
        crc = zlib.crc32(data, crc)
        file.write(data)
        file.write(_CRC.pack(crc))

    memory = kind.memory
    types = (type.value for type in memory.types)
    version = _VERSION_TAIL if memory.has_tails else _VERSION_SCALES if kind.scales else _VERSION
    if snapshots:
        version = _VERSION_SNAPSHOTS
    put(_HEAD.pack(_MAGIC, version, tokens.size, *types, len(memory), piece, memory.token_bytes, kind.model))
    if version > _VERSION:
        put(_COUNT.pack(len(kind.scales)) + np.array(kind.scales, "<f4").tobytes())
    if version >= _VERSION_TAIL:
        put(_digest(memory))
        points = sorted(snapshots)
        if points:
            put(_COUNT.pack(len(points)) + np.array(points, "<u4").tobytes())
        put(tail.data)
        for point in points:
            put(snapshots[point].data)
    put(tokens.astype("<i4").tobytes())
    for data in pieces:
        put(data.data)


def _digest(memory: Memory) -> bytes:
    return hashlib.sha256(memory.kind.encode()).digest()


class SlotReader:
    """An open file of a saved slot, checked from end to end: `tokens`, `scales`, `tail` and `snapshots`.

    `kind` returns the meaning of cells that were computed with given scales of the `n_adapters` adapters. Raises
    SlotFileError.
    """

    def __init__(
        self,
        path: Path,
        kind: Callable[[Scales], CellKind],
        *,
        n_ctx: int,
        n_vocab: int,
        n_adapters: int = 0,
    ) -> None:
        self._name = path.name
        try:
            # without following a link, and without waiting for the other end of a pipe
            flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            fd = os.open(path, flags | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise self._bad(error.strerror or str(error)) from error
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise self._bad("it is not a regular file")
        self._file: BinaryIO = os.fdopen(fd, "rb")
        try:
            self.size = found.st_size
            self._crc = 0
            self.scales: Scales = ()
            self.tail: Cells = np.empty(0, np.uint8)
            self.snapshots: dict[int, Cells] = {}
            self.tokens, self._piece = self._head(kind, n_ctx, n_vocab, n_adapters)
            self._body, self._body_crc = self._file.tell(), self._crc
            memory = self._kind.memory
            tails = {self.tokens.size: self.tail} | self.snapshots
            sound = all(memory.is_valid_tail(tail, n) for n, tail in tails.items())
            if not sound or not all(memory.is_valid(data, n) for _, n, data in self.pieces()):
                raise self._bad("its cells contain NaN or infinity")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def pieces(self) -> Iterator[tuple[int, int, Cells]]:
        """Yield the cells from the beginning on: position, number, bytes."""
        self._file.seek(self._body)
        self._crc = self._body_crc
        for start in range(0, self.tokens.size, self._piece):
            n = min(self._piece, self.tokens.size - start)
            yield start, n, np.frombuffer(self._take(n * self._kind.memory.token_bytes), np.uint8)

    def _head(
        self, kind_of: Callable[[Scales], CellKind], n_ctx: int, n_vocab: int, n_adapters: int
    ) -> tuple[Tokens, int]:
        if self.size < _HEAD.size + _CRC.size:
            raise self._bad("it is not a saved slot")
        magic, version, n, type_k, type_v, n_layers, piece, cell_bytes, model = _HEAD.unpack(self._take(_HEAD.size))
        if magic != _MAGIC:
            raise self._bad("it is not a saved slot")
        if not _VERSION <= version <= _VERSION_SNAPSHOTS:
            raise self._bad(f"it has version {version} of the format; supported are {_VERSION} to {_VERSION_SNAPSHOTS}")
        size = 0
        if version != _VERSION:
            size += self._scales(n_adapters, none=version >= _VERSION_TAIL)
        kind = self._kind = kind_of(self.scales)
        memory = kind.memory
        if model != kind.model and self.scales:
            raise self._bad("it was saved with another model or other LoRA adapters")
        if model != kind.model:
            raise self._bad("it was saved with another model")
        if (type_k, type_v) != tuple(type.value for type in memory.types):
            raise self._bad("it was saved with a cache of other types (--cache-type-k, --cache-type-v)")
        tail = version >= _VERSION_TAIL
        if tail != memory.has_tails or (tail and self._take(_DIGEST) != _digest(memory)):
            raise self._bad("it was saved with another kind of memory: another context or number of slots (-c, -np)")
        if (n_layers, cell_bytes) != (len(memory), memory.token_bytes) or not 0 < piece <= _MOST_CELLS:
            raise self._bad("its header is wrong")
        if n > n_ctx:
            raise self._bad(f"its {n} tokens do not fit the slot's context of {n_ctx}")
        n_tail = memory.tail_bytes(n)
        points = self._points(n) if version == _VERSION_SNAPSHOTS else []
        if tail:
            size += _DIGEST + n_tail + 2 * _CRC.size
        if points:
            size += _COUNT.size + 4 * len(points) + _CRC.size
            size += sum(memory.tail_bytes(point) + _CRC.size for point in points)
        n_pieces = -(-n // piece)
        if self.size != _HEAD.size + size + 4 * n + n * cell_bytes + _CRC.size * (2 + n_pieces):
            raise self._bad("it has the wrong length")
        if tail:
            self.tail = np.frombuffer(self._take(n_tail), np.uint8)
        for point in points:
            self.snapshots[point] = np.frombuffer(self._take(memory.tail_bytes(point)), np.uint8)
        tokens = np.frombuffer(self._take(4 * n), "<i4").astype(np.int32)
        if n and int(tokens.max()) >= n_vocab:  # ids of media are below zero
            raise self._bad("it contains tokens that the model does not have")
        return tokens, piece

    def _points(self, n: int) -> list[int]:
        """Read the token counts of the snapshots."""
        place = self._file.tell()
        count = int.from_bytes(self._file.read(_COUNT.size), "little")
        if not 0 < count <= min(n, _MOST_SNAPSHOTS):
            raise self._bad("its header is wrong")
        self._file.seek(place)
        points: list[int] = np.frombuffer(self._take(_COUNT.size + 4 * count)[_COUNT.size :], "<u4").tolist()
        if points != sorted(set(points)) or not 0 < points[0] <= points[-1] < n:
            raise self._bad("its header is wrong")
        return points

    def _scales(self, n_adapters: int, none: bool) -> int:
        """Read the scales, which may be missing if `none`; return their size in bytes."""
        place = self._file.tell()
        n = int.from_bytes(self._file.read(_COUNT.size), "little")
        if none and not n:
            self._file.seek(place)
            return len(self._take(_COUNT.size)) + _CRC.size
        if n != n_adapters or not n:
            raise self._bad(f"it was saved with {n} LoRA adapters; there are {n_adapters}")
        self._file.seek(place)
        scales = np.frombuffer(self._take(_COUNT.size + 4 * n)[_COUNT.size :], "<f4")
        if not np.isfinite(scales).all() or not scales.any():
            raise self._bad("its scales of LoRA adapters are wrong")
        self.scales = tuple(scales.tolist())
        return _COUNT.size + 4 * n + _CRC.size

    def _take(self, n: int) -> bytes:
        """Read the next `n` bytes and check them against the checksum that follows."""
        try:
            data = self._file.read(n)
            crc = self._file.read(_CRC.size)
        except OSError as error:
            raise self._bad(error.strerror or str(error)) from error
        self._crc = zlib.crc32(data, self._crc)
        if len(data) < n or crc != _CRC.pack(self._crc):
            raise self._bad("it is not a saved slot" if not data.startswith(_MAGIC) and n == _HEAD.size else "damaged")
        return data

    def _bad(self, why: str) -> SlotFileError:
        return SlotFileError(f"{self._name}: {why}")
