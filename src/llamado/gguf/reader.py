"""GGUF reader (versions 2 and 3, little-endian, one file or split), based on memory mapping."""

from __future__ import annotations

import os
from collections.abc import Callable
from mmap import mmap as MemoryMap
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from llamado.gguf.errors import GgufError
from llamado.gguf.header import Header, TensorInfo
from llamado.gguf.pages import allocate_pages, request_huge_pages
from llamado.gguf.report import Progress
from llamado.gguf.shards import Shard, check_shard, check_tensor_count, other_shards, release

READ_CHUNK = 32 << 20


class GGUFFile:
    """An open GGUF model: metadata, tensor table and zero-copy views of the tensor data of all its shards."""

    def __init__(self, path: Path, shards: list[Shard]) -> None:
        self.path = path
        self.version = shards[0].version
        self.alignment = shards[0].alignment
        self.metadata = shards[0].metadata
        self.shard_paths = [shard.path for shard in shards]
        self.file_bytes = sum(len(shard.memory) for shard in shards)
        self.tensors: dict[str, TensorInfo] = {}
        for shard in shards:
            for info in shard.tensors:
                if info.name in self.tensors:
                    raise GgufError(
                        f"tensor '{info.name}' is already in {shards[self.tensors[info.name].shard].path.name}",
                        path=shard.path,
                        field=info.name,
                    )
                self.tensors[info.name] = info
        self.nbytes = sum(info.nbytes for info in self.tensors.values())
        self.mapped = True
        """True if the weights are only in the file, not read into memory."""
        self._maps = [shard.memory for shard in shards]
        self._arrays = [np.frombuffer(memory, np.uint8) for memory in self._maps]

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mmap: bool = True, progress: Progress | None = None) -> GGUFFile:
        """Open a model file, including the other shards if it is the first of a split model; raise `GgufError`.

        With `mmap=False` the files are read into memory, so that they may change or vanish afterwards; `progress(done,
        total)` is called with byte counts.
        """
        first_path = Path(path)
        first = Shard(first_path, 0)
        shards = [first]
        try:
            for i, shard_path in enumerate(other_shards(first), 1):
                shard = Shard(shard_path, i)
                shards.append(shard)
                check_shard(first, shard, i)
            check_tensor_count(shards)
            file = cls(first_path, shards)
        except BaseException:
            for shard in shards:
                release(shard.memory)
            raise
        if not mmap:
            file._read_into_memory(progress)
        return file

    def data(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes, uint8[nbytes], as a read-only view; raise `GgufError` if the name is unknown."""
        info = self.tensors.get(name)
        if info is None:
            raise GgufError(f"there is no tensor '{name}'", path=self.path, field=name)
        return self.shard_data(info.shard)[info.offset : info.offset + info.nbytes]

    @property
    def source(self) -> str:
        """Location of the file, for messages."""
        return str(self.path)

    @property
    def header(self) -> Header:
        """The header, with the tensors of all shards."""
        return Header(
            self.source,
            self.metadata,
            self.tensors,
            self.version,
            self.alignment,
            self.file_bytes,
            self.n_shards,
            self.mapped,
        )

    @property
    def n_shards(self) -> int:
        return len(self.shard_paths)

    def shard_data(self, shard: int) -> NDArray[np.uint8]:
        """Return a whole shard as uint8[file size], read-only; `TensorInfo.offset` is an index into it."""
        if not self._arrays:
            raise GgufError("the file has been closed", path=self.path)
        return self._arrays[shard]

    def close(self) -> None:
        """Release the mapping. Memory still used by arrays is freed when they are gone."""
        self._arrays = []
        for memory in self._maps:
            release(memory)
        self._maps = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.tensors)} tensors, {self.nbytes} bytes)"

    def _read_into_memory(self, progress: Progress | None) -> None:
        done = 0

        def report(n: int) -> None:
            nonlocal done
            done += n
            if progress is not None:
                progress(done, self.file_bytes)

        for i, path in enumerate(self.shard_paths):
            try:
                memory = _read_whole(path, len(self._arrays[i]), report)
            except (OSError, MemoryError) as error:
                raise GgufError(f"cannot be read into memory: {error}", path=path) from error
            array = np.frombuffer(memory, np.uint8)
            array.flags.writeable = False
            self._arrays[i] = array
            self._maps[i] = memory
        self.mapped = False


def _read_whole(path: Path, size: int, report: Callable[[int], None]) -> MemoryMap:
    """Read a file into memory; `report` is called with the size of each chunk."""
    memory = allocate_pages(size)
    request_huge_pages(memory, 0, size)
    with open(path, "rb", buffering=0) as stream, memoryview(memory) as view:
        at = 0
        while at < size:
            with view[at : at + READ_CHUNK] as chunk:
                n = stream.readinto(chunk)
            if not n:
                raise GgufError("the file was truncated while it was being read", path=path, offset=at)
            at += n
            report(n)
    return memory
