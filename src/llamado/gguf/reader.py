"""Reads GGUF files (versions 2 and 3, little-endian, one file or split) by memory mapping, trusting nothing in them.

The format is described in ggml's `docs/gguf.md` and at the head of `ggml/include/gguf.h`: magic, version, two counts,
metadata, tensor table, padding, tensor data. Every count is compared with the bytes that are left before anything is
allocated for it, so that a damaged file costs an error, never memory.
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ
from mmap import mmap as MemoryMap
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from llamado.gguf.errors import GgufError, TruncatedFile
from llamado.gguf.metadata import Metadata, StringArray, Value, ValueType
from llamado.gguf.report import Progress
from llamado.gguf.types import TensorType

__all__ = ["GGUFFile", "GgufError", "Metadata", "StringArray", "TensorInfo", "TensorType", "Value", "ValueType"]

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NAME = 63  # GGML_MAX_NAME less the closing zero
MAX_KEY = 65535  # docs/gguf.md: keys are at most 2^16-1 bytes long

# Limits of our own. Small objects cost Python far more than their bytes in the file, so the counts of things that
# become one object each are bounded; the largest published models stay below a tenth of these.
MAX_ENTRIES = 1 << 17  # metadata keys, and tensors, per shard
MAX_NESTED_ARRAYS = 1 << 14
MAX_ARRAY_DEPTH = 4
MAX_STRINGS = 1 << 24  # per array; scanning that many takes two seconds
MAX_ALIGNMENT = 1 << 24
MAX_ELEMENTS = 2**63 - 1
READ_CHUNK = 32 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<?"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}
_DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("u1"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one character, type, a one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # name length, n_dims, type, offset
_MIN_ARRAY_BYTES = 4 + 8  # element type, count
# Types that ggml has removed; files that hold them were made for one CPU family and must be converted anew.
_REMOVED_TYPES = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"} | {
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
_STRANGERS = {
    b"PK\x03\x04": "a zip archive (a PyTorch checkpoint or a wheel?)",
    b"\x80\x02": "a Python pickle",
    b"ggjt": "an old ggml model (GGJT), from before GGUF",
    b"tjgg": "an old ggml model (GGJT), from before GGUF",
    b"lmgg": "an old ggml model, from before GGUF",
    b"version https://git-lfs": "a git-lfs pointer, not the file itself: run `git lfs pull`",
    b"<": "a web page, probably an error that was saved as a file",
}
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file: `ne[0]` is the fastest dimension, `offset` counts from the start of the shard's file."""

    name: str
    type: TensorType
    ne: tuple[int, int, int, int]
    offset: int
    nbytes: int
    shard: int

    @property
    def n_elements(self) -> int:
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself before its weights: metadata, and its tensors' types by their names.

    `source` is where the file is, for messages. Of a split file, the first shard's.
    """

    source: str
    metadata: Metadata
    types: Mapping[str, TensorType]


class GGUFFile:
    """An open GGUF model: metadata, tensor table and zero-copy views of the tensor data of all its shards."""

    def __init__(self, path: Path, shards: list[_Shard]) -> None:
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
        """Whether the weights are in the file alone, not read into memory."""
        self._maps = [shard.memory for shard in shards]
        self._arrays = [np.frombuffer(memory, np.uint8) for memory in self._maps]

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mmap: bool = True, progress: Progress | None = None) -> GGUFFile:
        """Open a model file, and all its shards when it is the first of a split model; raises `GgufError`.

        With `mmap=False` the files are read into memory (they may then change or vanish), and `progress(done, total)`
        is called with bytes.
        """
        first_path = Path(path)
        first = _Shard(first_path, 0)
        shards = [first]
        try:
            for i, shard_path in enumerate(_other_shards(first), 1):
                shard = _Shard(shard_path, i)
                shards.append(shard)
                _check_shard(first, shard, i)
            _check_tensor_count(shards)
            file = cls(first_path, shards)
        except BaseException:
            for shard in shards:
                _release(shard.memory)
            raise
        if not mmap:
            file._read_into_memory(progress)
        return file

    def data(self, name: str) -> NDArray[np.uint8]:
        """Bytes of a tensor, uint8[nbytes], a read-only view; raises `GgufError` for an unknown name."""
        info = self.tensors.get(name)
        if info is None:
            raise GgufError(f"there is no tensor '{name}'", path=self.path, field=name)
        return self.shard_data(info.shard)[info.offset : info.offset + info.nbytes]

    @property
    def header(self) -> Header:
        """What it says of itself; its tensors are those of all shards."""
        return Header(str(self.path), self.metadata, {name: info.type for name, info in self.tensors.items()})

    @property
    def n_shards(self) -> int:
        return len(self.shard_paths)

    def shard_data(self, shard: int) -> NDArray[np.uint8]:
        """The whole of a shard's file as uint8[file size], read-only; `TensorInfo.offset` is an index into it."""
        if not self._arrays:
            raise GgufError("the file has been closed", path=self.path)
        return self._arrays[shard]

    def close(self) -> None:
        """Let go of the mapping; memory that arrays handed out still show stays until they are gone."""
        self._arrays = []
        for memory in self._maps:
            _release(memory)
        self._maps = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.tensors)} tensors, {self.nbytes} bytes)"

    def _read_into_memory(self, progress: Progress | None) -> None:
        done = 0
        for i, path in enumerate(self.shard_paths):
            size = len(self._arrays[i])
            try:
                memory = MemoryMap(-1, size)  # anonymous and page-aligned, which np.empty is not
                with open(path, "rb", buffering=0) as stream, memoryview(memory) as view:
                    at = 0
                    while at < size:
                        with view[at : at + READ_CHUNK] as chunk:
                            n = stream.readinto(chunk)
                        if not n:
                            raise GgufError("the file became shorter while it was read", path=path, offset=at)
                        at += n
                        done += n
                        if progress is not None:
                            progress(done, self.file_bytes)
            except (OSError, MemoryError) as error:
                raise GgufError(f"cannot be read into memory: {error}", path=path) from error
            array = np.frombuffer(memory, np.uint8)
            array.flags.writeable = False
            self._arrays[i] = array
            self._maps[i] = memory
        self.mapped = False


class _Shard:
    """One file, mapped and parsed."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.memory = _map(path)
        try:
            cursor = _Cursor(self.memory, path)
            self.version = _read_version(cursor)
            n_tensors = cursor.count("tensor count", _MIN_TENSOR_BYTES, MAX_ENTRIES)
            n_keys = cursor.count("metadata count", _MIN_KEY_BYTES, MAX_ENTRIES)
            self.metadata = _read_metadata(cursor, n_keys)
            self.alignment = _alignment(cursor, self.metadata)
            self.tensors = _placed(cursor, _read_tensors(cursor, n_tensors, self.alignment), self.alignment, number)
        except BaseException:
            _release(self.memory)
            raise


def parse_header(start: bytes, source: str) -> Header:
    """The header of a file (one shard) from its first bytes; raises GgufError, or TruncatedFile for too few."""
    cursor = _Cursor(start, source)
    cursor.need(len(MAGIC) + 4, "magic")
    _read_version(cursor)
    n_tensors = cursor.count("tensor count", _MIN_TENSOR_BYTES, MAX_ENTRIES)
    n_keys = cursor.count("metadata count", _MIN_KEY_BYTES, MAX_ENTRIES)
    metadata = _read_metadata(cursor, n_keys)
    rows = _read_tensors(cursor, n_tensors, _alignment(cursor, metadata))
    return Header(source, metadata, {row.name: row.type for row in rows})


def _release(memory: MemoryMap) -> None:
    try:
        memory.close()
    except BufferError:
        pass  # an array still looks into it; the mapping goes with the last one


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


class _Cursor:
    """A position in a mapped file; every read is checked against the end and names the field it was for."""

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
                f"the file ends too early: {n} bytes are due and {self.size - self.pos} are left; "
                "it is damaged or was not fetched whole",
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
        """A number of things that take at least `least_bytes` each, so that no more than fit the file are believed."""
        at = self.pos
        n = self.u64(field)
        if n > (self.size - self.pos) // least_bytes:
            self.truncated(f"{n} does not fit the {self.size - self.pos} bytes that are left; it is damaged", field, at)
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


def _read_version(cursor: _Cursor) -> int:
    head = cursor.memory[: len(MAGIC)]
    if head != MAGIC:
        start = cursor.memory[:32]
        stranger = next((text for magic, text in _STRANGERS.items() if start.startswith(magic)), None)
        cursor.fail(f"not a GGUF file: it looks like {stranger}" if stranger else "not a GGUF file", "magic")
    cursor.pos = len(MAGIC)
    at = cursor.pos
    version = cursor.u32("version")
    if version and version & 0xFFFF == 0:
        cursor.fail(
            "the file is big-endian, which llamado does not read; convert it to little-endian "
            "(`gguf-convert-endian MODEL little` from the gguf package)",
            "version",
            at,
        )
    if version == 1:
        cursor.fail("GGUF version 1 is no longer read; convert the model anew", "version", at)
    if version not in (2, 3):
        cursor.fail(f"GGUF version {version} is unknown; versions 2 and 3 are read", "version", at)
    return version


def _read_metadata(cursor: _Cursor, n_keys: int) -> Metadata:
    values: dict[str, Value] = {}
    types: dict[str, str] = {}
    budget = _Budget()
    for i in range(n_keys):
        at = cursor.pos
        key = cursor.name(f"metadata key {i}", MAX_KEY)
        if not key:
            cursor.fail("the key is empty", f"metadata key {i}", at)
        if key in values:
            cursor.fail("the key appears twice", key, at)
        values[key], types[key] = _read_value(cursor, key, _value_type(cursor, key), budget, 0)
    return Metadata(values, types, path=cursor.path)


@dataclass(slots=True)
class _Budget:
    nested_arrays: int = MAX_NESTED_ARRAYS


def _value_type(cursor: _Cursor, field: str) -> ValueType:
    at = cursor.pos
    number = cursor.u32(field)
    try:
        return ValueType(number)
    except ValueError:
        cursor.fail(f"value type {number} is unknown; types 0 to {max(ValueType).value} exist", field, at)


def _read_value(cursor: _Cursor, field: str, kind: ValueType, budget: _Budget, depth: int) -> tuple[Value, str]:
    """A value and the name of its type."""
    if kind == ValueType.STRING:
        return cursor.raw(field).decode("utf-8", "replace"), "string"
    if kind != ValueType.ARRAY:
        layout = _SCALARS[kind]
        cursor.need(layout.size, field)
        value: Value = layout.unpack_from(cursor.memory, cursor.pos)[0]
        cursor.pos += layout.size
        return value, kind.name.lower()
    if depth >= MAX_ARRAY_DEPTH:
        cursor.fail(f"arrays are nested more than {MAX_ARRAY_DEPTH} deep", field)
    element = _value_type(cursor, field)
    type_name = f"array of {element.name.lower()}"
    if element == ValueType.STRING:
        return _read_strings(cursor, field), type_name
    if element == ValueType.ARRAY:
        n = cursor.count(field, _MIN_ARRAY_BYTES)
        if n > budget.nested_arrays:
            cursor.fail(f"more than {MAX_NESTED_ARRAYS} nested arrays", field)
        budget.nested_arrays -= n
        return [_read_value(cursor, field, ValueType.ARRAY, budget, depth + 1)[0] for _ in range(n)], type_name
    return _read_numbers(cursor, field, element), type_name


def _read_numbers(cursor: _Cursor, field: str, element: ValueType) -> NDArray[Any]:
    dtype = _DTYPES[element]
    n = cursor.count(field, dtype.itemsize)
    if n == 0:
        return np.empty(0, np.bool_ if element == ValueType.BOOL else dtype)
    numbers = np.frombuffer(cursor.memory, dtype, n, cursor.pos)
    cursor.pos += n * dtype.itemsize
    if element == ValueType.BOOL:
        numbers = numbers != 0
    elif not numbers.flags.aligned:
        # Nothing aligns arrays in the metadata, and compiled code wants them aligned.
        numbers = numbers.copy()
    numbers.flags.writeable = False
    return numbers


def _read_strings(cursor: _Cursor, field: str) -> StringArray:
    n = cursor.count(field, 8, MAX_STRINGS)
    start = pos = cursor.pos
    # A vocabulary has a quarter of a million of these: the loop does one unpack, one addition and one append each, and
    # leaves the bounds to unpack_from, which refuses an offset beyond the end.
    ends = array("q")
    append, unpack, memory = ends.append, _U64.unpack_from, cursor.memory
    try:
        for _ in range(n):
            pos += 8 + unpack(memory, pos)[0]
            append(pos)
    except (struct.error, OverflowError):
        pos = cursor.size + 1
    if pos > cursor.size:
        cursor.truncated(
            f"string {max(len(ends) - 1, 0)} of {n} runs over the end of the file; it is damaged",
            field,
            min(int(ends[-2]) if len(ends) > 1 else start, cursor.size),
        )
    cursor.pos = pos
    offsets = np.zeros(n + 1, np.int64)
    if n == 0:
        return StringArray(b"", offsets)
    bounds = np.frombuffer(ends, np.int64)
    # The lengths sit between the strings; taking their eight bytes each out leaves the strings end to end.
    np.subtract(bounds, start, out=offsets[1:])
    keep = np.ones(pos - start, np.bool_)
    for i in range(8):
        keep[offsets[:-1] + i] = False
    offsets[1:] -= 8 * np.arange(1, n + 1)
    return StringArray(np.frombuffer(memory, np.uint8, pos - start, start)[keep].tobytes(), offsets)


def _alignment(cursor: _Cursor, metadata: Metadata) -> int:
    key = "general.alignment"
    if key not in metadata:
        return DEFAULT_ALIGNMENT
    if metadata.type_name(key) != "uint32":
        cursor.fail(f"the alignment must be a uint32 but is {metadata.type_name(key)}", key)
    alignment = metadata.int_(key)
    if alignment == 0 or alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
        cursor.fail(f"the alignment {alignment} is not a power of two up to {MAX_ALIGNMENT}", key)
    return alignment


class _TensorInfo(NamedTuple):
    """A row of the tensor table: `offset` counts from the start of the data, `at` is where it stands in the file."""

    name: str
    type: TensorType
    ne: tuple[int, int, int, int]
    offset: int
    nbytes: int
    at: int


def _read_tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> list[_TensorInfo]:
    rows: list[_TensorInfo] = []
    names: set[str] = set()
    for i in range(n_tensors):
        at = cursor.pos
        name = cursor.name(f"name of tensor {i}", MAX_NAME)
        if name in names:
            cursor.fail(f"tensor '{name}' appears twice", name, at)
        names.add(name)
        ne = _read_shape(cursor, name)
        kind = _tensor_type(cursor, name)
        try:
            nbytes = kind.row_bytes(ne[0]) * ne[1] * ne[2] * ne[3]
        except ValueError as error:
            cursor.fail(str(error), name)
        at = cursor.pos
        offset = cursor.u64(name)
        if offset % alignment:
            cursor.fail(f"the data offset {offset} is not a multiple of the alignment {alignment}", name, at)
        rows.append(_TensorInfo(name, kind, ne, offset, nbytes, at))
    return rows


def _placed(cursor: _Cursor, rows: list[_TensorInfo], alignment: int, shard: int) -> list[TensorInfo]:
    """The tensors where their data lies, which must be in the file and no other's."""
    data_start = -(-cursor.pos // alignment) * alignment
    data_size = max(cursor.size - data_start, 0)
    for name, _, _, offset, nbytes, at in rows:
        if offset + nbytes > data_size:
            cursor.fail(
                f"the tensor needs data bytes {offset} to {offset + nbytes} and the file has {data_size}; "
                "it is damaged or was not fetched whole",
                name,
                at,
            )
    last_name, last_end = "", 0
    for name, _, _, offset, nbytes, at in sorted(rows, key=lambda row: row[3]):
        if offset < last_end:
            cursor.fail(f"the data overlaps that of tensor '{last_name}'", name, at)
        last_name, last_end = name, offset + nbytes
    return [
        TensorInfo(name, kind, ne, data_start + offset, nbytes, shard) for name, kind, ne, offset, nbytes, _ in rows
    ]


def _read_shape(cursor: _Cursor, name: str) -> tuple[int, int, int, int]:
    at = cursor.pos
    n_dims = cursor.u32(name)
    if n_dims > MAX_DIMS:
        cursor.fail(f"the tensor has {n_dims} dimensions; at most {MAX_DIMS} exist", name, at)
    ne = [1] * MAX_DIMS
    n_elements = 1
    for i in range(n_dims):
        at = cursor.pos
        ne[i] = cursor.u64(name)
        n_elements *= ne[i]
        if ne[i] == 0:
            cursor.fail(f"dimension {i} is zero", name, at)
        if n_elements > MAX_ELEMENTS:
            cursor.fail(f"the dimensions {ne[: i + 1]} multiply to more than 2^63-1 elements", name, at)
    return ne[0], ne[1], ne[2], ne[3]


def _tensor_type(cursor: _Cursor, name: str) -> TensorType:
    at = cursor.pos
    number = cursor.u32(name)
    try:
        return TensorType(number)
    except ValueError:
        if number in _REMOVED_TYPES:
            cursor.fail(
                f"tensor type {_REMOVED_TYPES[number]} has been removed from the format; convert the model anew",
                name,
                at,
            )
        cursor.fail(f"tensor type {number} is unknown to this version of llamado", name, at)


# Split models: llama.cpp's gguf-split writes `NAME-00001-of-0000N.gguf` with the keys below in every shard.
SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS = "split.count", "split.no", "split.tensors.count"


def shard_names(first: str) -> list[str] | None:
    """File names of all shards, given the name of one (`NAME-00001-of-0000N.gguf`); None where it is not of a split."""
    match = _SHARD_NAME.fullmatch(first)
    if match is None:
        return None
    count = int(match["count"])
    return [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def _other_shards(first: _Shard) -> list[Path]:
    """Paths of the shards after the first; raises `GgufError` when one is missing or `first` is not the first."""
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
            "for the others to be found",
            path=first.path,
            field=SPLIT_COUNT,
        )
    if len(names) != count or names[0] != first.path.name:
        raise GgufError(
            f"the file is part 1 of {count} but its name says otherwise", path=first.path, field=SPLIT_COUNT
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


def _check_shard(first: _Shard, shard: _Shard, number: int) -> None:
    count = first.metadata.int_(SPLIT_COUNT)
    for key, due in ((SPLIT_COUNT, count), (SPLIT_NO, number)):
        if shard.metadata.int_(key) != due:
            raise GgufError(
                f"{key} is {shard.metadata.int_(key)} where {due} is due; this file is not of the same model as "
                f"{first.path.name}",
                path=shard.path,
                field=key,
            )


def _check_tensor_count(shards: list[_Shard]) -> None:
    due = shards[0].metadata.int_(SPLIT_TENSORS, None)
    found = sum(len(shard.tensors) for shard in shards)
    if len(shards) > 1 and due is not None and due != found:
        raise GgufError(
            f"the shards hold {found} tensors where {due} are due", path=shards[0].path, field=SPLIT_TENSORS
        )
