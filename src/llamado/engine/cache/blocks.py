"""Block files of the prompt cache on disk: cells of a number of tokens, and tails (see Memory.read_tail).

A block's name is a hash of all tokens up to its end, through its parent's name, and of the meaning of its bytes. So the
common beginning of two conversations is in the same files, whichever process wrote them. Little-endian:

| bytes | content |
|---|---|
| 8 | magic `llamadoc` |
| 4 | version: 1 |
| 4 | 0: cells, 1: a tail |
| 4 | number of tokens `n` |
| 4 | tokens before them |
| 8 | bytes of data `m` |
| 16 | name of the parent block; for the first block the hash of the meaning of bytes |
| 32 | SHA-256 of the data |
| 4 n | tokens |
| 32 | SHA-256 of everything before |
| m | data |

Blocks of cells are full, except the last one of a sequence. A tail is the state after all tokens up to its last one,
and its parent is the last full block before that.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamado.engine.errors import EngineError
from llamado.engine.forward.contract import Cells

_MAGIC, _VERSION = b"llamadoc", 1
_HEAD = struct.Struct("<8s4IQ16s32s")
_DIGEST = 32
_MOST_TOKENS = 4096
"""Larger blocks were not written by llamado."""
NAME_BYTES = 16
PART = ".part"
"""File name suffix while a file is being written."""

Tokens = NDArray[np.int32]


class BadBlock(EngineError):
    """A file is not a valid block, or incomplete."""


@dataclass(frozen=True, slots=True)
class Block:
    """The header of a block file."""

    path: Path
    name: bytes
    parent: bytes
    start: int
    tokens: Tokens
    is_tail: bool
    n_bytes: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.start + self.tokens.size

    @property
    def _offset(self) -> int:
        return _HEAD.size + 4 * self.tokens.size + _DIGEST

    @property
    def file_bytes(self) -> int:
        return self._offset + self.n_bytes


def name_of(parent: bytes, tokens: Tokens, is_tail: bool) -> bytes:
    """Return the name of a block, 16 bytes."""
    digest = hashlib.sha256(parent + (b"tail" if is_tail else b"cells"))
    digest.update(tokens.astype("<i4").tobytes())
    return digest.digest()[:NAME_BYTES]


def path_of(folder: Path, family: str, name: bytes, is_tail: bool) -> Path:
    """Return the path of a block's file. `family` separates blocks whose bytes have different meanings."""
    return folder / f"{family}-{name.hex()}.{'tail' if is_tail else 'cells'}"


def write_block(path: Path, parent: bytes, start: int, tokens: Tokens, is_tail: bool, data: Cells) -> Block:
    """Write a file atomically. Raises OSError."""
    payload = np.ascontiguousarray(data).reshape(-1)
    digest = hashlib.sha256(payload.data).digest()
    head = _HEAD.pack(_MAGIC, _VERSION, is_tail, tokens.size, start, payload.size, parent, digest)
    head += tokens.astype("<i4").tobytes()
    head += hashlib.sha256(head).digest()
    temporary = path.with_name(f".{secrets.token_hex(8)}{PART}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
            for rest in (memoryview(head), payload.data):
                while rest:
                    rest = rest[file.write(rest) :]
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return Block(path, name_of(parent, tokens, is_tail), parent, start, tokens, is_tail, payload.size, digest)


def read_head(path: Path) -> Block:
    """Read and check the header of a file. Raises BadBlock and OSError."""
    with _opened(path) as file:
        head = file.read(_HEAD.size) or b""
        if len(head) < _HEAD.size:
            raise BadBlock("it is cut off")
        magic, version, is_tail, n, start, n_bytes, parent, digest = _HEAD.unpack(head)
        if magic != _MAGIC or version != _VERSION or is_tail > 1 or not 0 < n <= _MOST_TOKENS:
            raise BadBlock("its header is wrong")
        rest = file.read(4 * n + _DIGEST) or b""
        if len(rest) < 4 * n + _DIGEST or hashlib.sha256(head + rest[: 4 * n]).digest() != rest[4 * n :]:
            raise BadBlock("its header is damaged")
        tokens = np.frombuffer(rest[: 4 * n], "<i4").astype(np.int32)
        block = Block(
            path, name_of(parent, tokens, bool(is_tail)), parent, start, tokens, bool(is_tail), n_bytes, digest
        )
        if os.fstat(file.fileno()).st_size != block.file_bytes:
            raise BadBlock("it has the wrong length")
    if block.name.hex() not in path.name:
        raise BadBlock("it has another's name")
    return block


def read_data(block: Block) -> Cells:
    """Read and check the data of a file. Raises BadBlock and OSError.

    The file is read, not mapped: a page fault in a mapping would stop all Python threads.
    """
    data = np.empty(block.n_bytes, np.uint8)
    with _opened(block.path) as file:
        file.seek(block._offset)
        rest = data.data
        while rest and (n := file.readinto(rest)):
            rest = rest[n:]
    if len(rest) or hashlib.sha256(data.data).digest() != block.digest:
        raise BadBlock("it is damaged")
    return data


def _opened(path: Path) -> io.FileIO:
    """Open a regular file, without following a link and without waiting for the other end of a pipe."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    fd = os.open(path, flags | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
    file = io.FileIO(fd, "r")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        file.close()
        raise BadBlock("it is not a regular file")
    return file


def regroup(pieces: Sequence[tuple[int, Cells]], rows: Sequence[int], n: int) -> Iterator[tuple[int, Cells]]:
    """Regroup cells to `n` per piece; the last piece has the rest.

    `pieces`: number of cells, and their bytes: tensor by tensor, with rows of `rows` bytes.
    """
    starts = np.cumsum([0, *(count for count, _ in pieces)]).tolist()
    for first in range(0, starts[-1], n):
        end = min(first + n, starts[-1])
        found: list[Cells] = []
        for i, row in enumerate(rows):
            before = sum(rows[:i])
            for (count, data), start in zip(pieces, starts, strict=False):
                a, b = max(first, start), min(end, start + count)
                if a < b:
                    at = count * before
                    found.append(data[at + (a - start) * row : at + (b - start) * row])
        yield end - first, np.concatenate(found) if found else np.empty(0, np.uint8)
