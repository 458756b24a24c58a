"""Split a file into parts and merge them, byte for byte like llama-gguf-split.

The first part has all key-values; every part has the three of `shards.py`, in this order and with these types. Source:
tools/gguf-split/gguf-split.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamado.gguf.edit.copying import CopyProgress, all_data, new_tensors
from llamado.gguf.errors import GgufError
from llamado.gguf.header import DEFAULT_ALIGNMENT, TensorInfo
from llamado.gguf.metadata import ValueType
from llamado.gguf.reader import GGUFFile
from llamado.gguf.report import Progress
from llamado.gguf.shards import SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS
from llamado.gguf.writer import Fields, encode, header_bytes, padded, read_fields, write_gguf

MAX_PARTS = 65535  # split.count has 16 bits


@dataclass(frozen=True)
class PartSize:
    """Size limit of a part: a number of tensors, or their bytes (a larger tensor gets a part of its own)."""

    tensors: int | None = None
    nbytes: int | None = None

    def is_full(self, n: int, nbytes: int, more: int) -> bool:
        """Return True if a part of `n` tensors and `nbytes` cannot take another tensor of `more` bytes."""
        if self.tensors is not None:
            return n >= self.tensors
        return n > 0 and self.nbytes is not None and nbytes + more > self.nbytes


@dataclass(frozen=True)
class FilePart:
    """A part to be written."""

    name: str
    fields: Fields
    tensors: Sequence[TensorInfo]

    @property
    def nbytes(self) -> int:
        """Return the size of header and tensors in bytes."""
        return len(header_bytes(self.fields, new_tensors(self.tensors))) + sum(t.nbytes for t in self.tensors)


def plan_parts(file: GGUFFile, stem: str, size: PartSize, *, none_in_first: bool = False) -> list[FilePart]:
    """Plan the parts of a file, named `stem`-00001-of-0000N.gguf; with `none_in_first` the first has no tensors.

    Raises GgufError if the file is split already, or the parts are too many.
    """
    if file.n_shards > 1:
        raise GgufError("the model is split already; merge it first", path=file.path, field=SPLIT_COUNT)
    groups: list[list[TensorInfo]] = [[], []] if none_in_first else [[]]
    nbytes = 0
    for info in file.tensors.values():
        more = padded(info.nbytes, DEFAULT_ALIGNMENT)
        if size.is_full(len(groups[-1]), nbytes, more):
            groups.append([])
            nbytes = 0
        groups[-1].append(info)
        nbytes += more
    if len(groups) > MAX_PARTS:
        raise GgufError(f"{len(groups)} parts exceed the limit of {MAX_PARTS}: choose larger parts", path=file.path)
    fields = read_fields(file.path)
    return [
        FilePart(
            f"{stem}-{i + 1:05d}-of-{len(groups):05d}.gguf",
            _with_split_keys(fields if i == 0 else {}, i, len(groups), len(file.tensors)),
            group,
        )
        for i, group in enumerate(groups)
    ]


def write_parts(file: GGUFFile, parts: Sequence[FilePart], folder: Path, progress: Progress | None = None) -> None:
    """Write the parts, each atomically; `progress` counts bytes of tensor data. Raises GgufError."""
    counted = CopyProgress(file.nbytes, progress)
    for part in parts:
        data = (counted.pieces(file.data(info.name)) for info in part.tensors)
        write_gguf(folder / part.name, part.fields, new_tensors(part.tensors), data)


def merged_fields(file: GGUFFile) -> Fields:
    """Return the key-values of the merged file; raise GgufError if `file` is not part of a split model."""
    fields = read_fields(file.path)
    if SPLIT_COUNT not in fields:
        raise GgufError("the file is not part of a split model", path=file.path, field=SPLIT_COUNT)
    del fields[SPLIT_COUNT]
    return {**fields, SPLIT_COUNT: encode(0, ValueType.UINT16)}


def merge_parts(file: GGUFFile, to: Path, progress: Progress | None = None) -> None:
    """Write all parts of an open model to one file, which must not exist yet. Raises GgufError."""
    fields = merged_fields(file)
    if to.exists():
        raise GgufError("the file exists already", path=to)
    write_gguf(to, fields, new_tensors(file.tensors.values()), all_data(file, progress))


def _with_split_keys(fields: Fields, number: int, count: int, n_tensors: int) -> Fields:
    split = {
        SPLIT_NO: encode(number, ValueType.UINT16),
        SPLIT_TENSORS: encode(n_tensors, ValueType.INT32),
        SPLIT_COUNT: encode(count, ValueType.UINT16),
    }
    return {key: value for key, value in fields.items() if key not in split} | split
