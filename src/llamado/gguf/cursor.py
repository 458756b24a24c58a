"""A read position in the bytes of a GGUF file, with bounds checks."""

from __future__ import annotations

import struct
from mmap import mmap as MemoryMap
from pathlib import Path
from typing import NoReturn

from llamado.gguf.errors import GgufError, TruncatedFile

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in a mapped file. Every read is checked against the end of the file; errors name the field."""

    def __init__(self, memory: MemoryMap | bytes, path: Path | str) -> None:
        self.memory = memory
        self.path = path
        self.size = len(memory)
        self.pos = 0

    def fail(self, reason: str, field: str, at: int | None = None) -> NoReturn:
        raise GgufError(reason, path=self.path, offset=self.pos if at is None else at, field=field)

    def truncated(self, reason: str, field: str, at: int | None = None) -> NoReturn:
        raise TruncatedFile(reason, path=self.path, offset=self.pos if at is None else at, field=field)

    def need(self, n: int, field: str) -> None:
        if n > self.size - self.pos:
            self.truncated(
                f"the file ends too early: {n} more bytes expected, {self.size - self.pos} left; "
                "it is damaged or was not fetched whole: fetch it again",
                field,
            )

    def u32(self, field: str) -> int:
        self.need(4, field)
        value: int = _U32.unpack_from(self.memory, self.pos)[0]
        self.pos += 4
        return value

    def u64(self, field: str) -> int:
        self.need(8, field)
        value: int = _U64.unpack_from(self.memory, self.pos)[0]
        self.pos += 8
        return value

    def count(self, field: str, least_bytes: int, limit: int | None = None) -> int:
        """Read a count of items of at least `least_bytes` each; raise if they cannot fit in the file."""
        at = self.pos
        n = self.u64(field)
        if n > (self.size - self.pos) // least_bytes:
            self.truncated(
                f"{n} does not fit the {self.size - self.pos} bytes that are left; "
                "it is damaged or was not fetched whole: fetch it again",
                field,
                at,
            )
        if limit is not None and n > limit:
            self.fail(f"{n} is more than the {limit} this reader accepts", field, at)
        return n

    def raw(self, field: str, limit: int | None = None) -> bytes:
        at = self.pos
        n = self.u64(field)
        if limit is not None and n > limit:
            self.fail(f"a name of {n} bytes is longer than {limit}", field, at)
        self.need(n, field)
        self.pos += n
        return self.memory[self.pos - n : self.pos]

    def name(self, field: str, limit: int) -> str:
        at = self.pos
        try:
            return self.raw(field, limit).decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"the name is not UTF-8: {error.reason}", field, at + 8 + error.start)
