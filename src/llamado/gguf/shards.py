"""Shards of a model: map and parse each file, and check that all belong to the same model.

llama.cpp's gguf-split writes `NAME-00001-of-0000N.gguf` with the keys below in every shard.
"""

from __future__ import annotations

import os
import re
from mmap import ACCESS_READ
from mmap import mmap as MemoryMap
from pathlib import Path

from llamado.gguf.cursor import Cursor
from llamado.gguf.errors import GgufError
from llamado.gguf.header import place_tensors, read_table

SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS = "split.count", "split.no", "split.tensors.count"
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class Shard:
    """A mapped and parsed file of a model."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.memory = _map(path)
        try:
            cursor = Cursor(self.memory, path)
            table = read_table(cursor)
            self.version, self.metadata, self.alignment = table.version, table.metadata, table.alignment
            self.tensors = place_tensors(cursor, table, number)
        except BaseException:
            release(self.memory)
            raise


def shard_names(first: str) -> list[str] | None:
    """Return the file names of all shards, given one (`NAME-00001-of-0000N.gguf`); None if the model is not split."""
    match = _SHARD_NAME.fullmatch(first)
    if match is None:
        return None
    count = int(match["count"])
    return [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def other_shards(first: Shard) -> list[Path]:
    """Return the paths of the other shards; raise `GgufError` if one is missing or `first` is not the first shard."""
    count = first.metadata.int_(SPLIT_COUNT, 0)
    if count <= 1:
        return []
    number = first.metadata.int_(SPLIT_NO, 0)
    names = shard_names(first.path.name)
    if number != 0:
        hint = f": open {names[0]}" if names else ""
        raise GgufError(
            f"this is part {number + 1} of {count} of a split model; open the first part{hint}",
            path=first.path,
            field=SPLIT_NO,
        )
    if names is None:
        raise GgufError(
            f"the first of {count} parts of a split model must be named like NAME-00001-of-{count:05d}.gguf "
            "so that the others can be found",
            path=first.path,
            field=SPLIT_COUNT,
        )
    if len(names) != count or names[0] != first.path.name:
        raise GgufError(
            f"the file is part 1 of {count} but its name does not match", path=first.path, field=SPLIT_COUNT
        )
    paths = [first.path.with_name(name) for name in names[1:]]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise GgufError(
            f"the model is split into {count} files and these are missing beside it: {', '.join(missing[:3])}{more}",
            path=first.path,
            field=SPLIT_COUNT,
        )
    return paths


def check_shard(first: Shard, shard: Shard, number: int) -> None:
    count = first.metadata.int_(SPLIT_COUNT)
    for key, due in ((SPLIT_COUNT, count), (SPLIT_NO, number)):
        if shard.metadata.int_(key) != due:
            raise GgufError(
                f"{key} is {shard.metadata.int_(key)}, expected {due}; this file does not belong to the same model as "
                f"{first.path.name}",
                path=shard.path,
                field=key,
            )


def check_tensor_count(shards: list[Shard]) -> None:
    due = shards[0].metadata.int_(SPLIT_TENSORS, None)
    found = sum(len(shard.tensors) for shard in shards)
    if len(shards) > 1 and due is not None and due != found:
        raise GgufError(f"the shards hold {found} tensors; expected {due}", path=shards[0].path, field=SPLIT_TENSORS)


def _map(path: Path) -> MemoryMap:
    try:
        if path.is_dir():
            raise GgufError("is a directory; name the .gguf file in it", path=path)
        with open(path, "rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                raise GgufError("the file is empty; fetch it again", path=path, offset=0, field="magic")
            return MemoryMap(stream.fileno(), 0, access=ACCESS_READ)
    except FileNotFoundError:
        raise GgufError("there is no such file", path=path) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte, or not a regular file
        raise GgufError(f"cannot be opened: {error}", path=path) from error


def release(memory: MemoryMap) -> None:
    try:
        memory.close()
    except BufferError:
        pass  # an array still refers to it; the mapping is released with the last one
