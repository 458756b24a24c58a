"""GGUF headers: version, metadata and tensor table.

The format is described in ggml's `docs/gguf.md` and at the head of `ggml/include/gguf.h`: magic, version, two counts,
metadata, tensor table, padding, tensor data. All of it is untrusted input: every count is compared with the bytes that
are left before anything is allocated for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from llamado.gguf.cursor import Cursor
from llamado.gguf.metadata import Metadata, Value
from llamado.gguf.types import TensorType
from llamado.gguf.values import Budget, read_value, read_value_type

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NAME = 63  # GGML_MAX_NAME minus the terminating zero
MAX_KEY = 65535  # docs/gguf.md: keys are at most 2^16-1 bytes long

# Our own limits. Small objects cost Python far more than their bytes in the file, so the number of entries that become
# one object each is bounded; the largest published models stay below a tenth of these.
MAX_ENTRIES = 1 << 17  # metadata keys, and tensors, per shard
MAX_ALIGNMENT = 1 << 24
MAX_ELEMENTS = 2**63 - 1

_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one character, type, a one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # name length, n_dims, type, offset
# Types that ggml has removed: repacked for one CPU family; such files must be converted again.
_REMOVED_TYPES = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"} | {
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive (a PyTorch checkpoint or a wheel?)",
    b"\x80\x02": "a Python pickle",
    b"ggjt": "an old ggml model (GGJT), from before GGUF",
    b"tjgg": "an old ggml model (GGJT), from before GGUF",
    b"lmgg": "an old ggml model, from before GGUF",
    b"version https://git-lfs": "a git-lfs pointer, not the file itself: run `git lfs pull`",
    b"<": "a web page, probably an error that was saved as a file",
    b"{": "JSON, perhaps the configuration of a model",
}
_CONVERT = "llama.cpp's convert_hf_to_gguf.py makes GGUF of a model's folder, or fetch a GGUF of it"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a model file. `ne[0]` is the fastest dimension; `offset` counts from the start of the shard."""

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
    """Metadata and tensor table of a model, with tensors by name.

    `source` is the location shown in messages. For a split model, the metadata is the first shard's and the tensors are
    those of all shards. `mapped`: see `ModelFile.mapped`. `alternatives` maps other quantizations that could be fetched
    instead to their sizes in bytes.
    """

    source: str
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    version: int = 3
    alignment: int = DEFAULT_ALIGNMENT
    file_bytes: int = 0
    n_shards: int = 1
    mapped: bool = False
    alternatives: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(info.nbytes for info in self.tensors.values())


class ModelFile(Protocol):
    """Input for building a model: an open file or a header alone."""

    @property
    def source(self) -> str:
        """Location of the file, for messages."""
        ...

    @property
    def metadata(self) -> Metadata: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        ...

    @property
    def mapped(self) -> bool:
        """True if weights are read from the file on demand, so that pages can be dropped and read again."""
        ...


def parse_header(start: bytes, source: str, shard: int = 0) -> Header:
    """Parse the header of one shard from its first bytes; raise TruncatedFile if they are too few, else GgufError.

    The tensor data is not checked; `file_bytes` is the minimum size of a complete file.
    """
    cursor = Cursor(start, source)
    cursor.need(len(MAGIC) + 4, "magic")
    table = read_table(cursor)
    data_start = _data_start(cursor, table)
    tensors = _tensor_infos(table, data_start, shard)
    end = max((info.offset + info.nbytes for info in tensors), default=data_start)
    return Header(source, table.metadata, {t.name: t for t in tensors}, table.version, table.alignment, end)


def merge_headers(shards: Sequence[Header]) -> Header:
    """Merge the headers of all shards of a model."""
    tensors = {name: info for shard in shards for name, info in shard.tensors.items()}
    n_bytes = sum(shard.file_bytes for shard in shards)
    return replace(shards[0], tensors=tensors, file_bytes=n_bytes, n_shards=len(shards))


class Table(NamedTuple):
    """A header as stored; the offsets in `rows` count from the start of the data section."""

    version: int
    metadata: Metadata
    alignment: int
    rows: list[TableRow]


def read_table(cursor: Cursor) -> Table:
    """Read a header from the start of a file."""
    version = _read_version(cursor)
    n_tensors = cursor.count("tensor count", _MIN_TENSOR_BYTES, MAX_ENTRIES)
    n_keys = cursor.count("metadata count", _MIN_KEY_BYTES, MAX_ENTRIES)
    metadata = _read_metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    return Table(version, metadata, alignment, _read_tensors(cursor, n_tensors, alignment))


def key_spans(cursor: Cursor) -> dict[str, tuple[int, int]]:
    """Return the byte span of each key's value, including its type: first byte, and the byte after the last."""
    _read_version(cursor)
    cursor.count("tensor count", _MIN_TENSOR_BYTES, MAX_ENTRIES)
    spans: dict[str, tuple[int, int]] = {}
    budget = Budget()
    for i in range(cursor.count("metadata count", _MIN_KEY_BYTES, MAX_ENTRIES)):
        key = cursor.name(f"metadata key {i}", MAX_KEY)
        start = cursor.pos
        read_value(cursor, key, read_value_type(cursor, key), budget, 0)
        spans[key] = (start, cursor.pos)
    return spans


def _read_version(cursor: Cursor) -> int:
    head = cursor.memory[: len(MAGIC)]
    if head != MAGIC:
        start = bytes(cursor.memory[:32])
        other_format = next((text for magic, text in _OTHER_FORMATS.items() if start.startswith(magic)), None)
        if start[8:10] == b'{"':  # a JSON header, preceded by its length
            other_format = f"safetensors: {_CONVERT}"
        what = f"it looks like {other_format}" if other_format else f"it begins with {start[:8]!r}"
        cursor.fail(f"not a GGUF file: {what}", "magic")
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


def _read_metadata(cursor: Cursor, n_keys: int) -> Metadata:
    values: dict[str, Value] = {}
    types: dict[str, str] = {}
    budget = Budget()
    for i in range(n_keys):
        at = cursor.pos
        key = cursor.name(f"metadata key {i}", MAX_KEY)
        if not key:
            cursor.fail("the key is empty", f"metadata key {i}", at)
        if key in values:
            cursor.fail("the key appears twice", key, at)
        values[key], types[key] = read_value(cursor, key, read_value_type(cursor, key), budget, 0)
    return Metadata(values, types, path=cursor.path)


def _alignment(cursor: Cursor, metadata: Metadata) -> int:
    key = "general.alignment"
    if key not in metadata:
        return DEFAULT_ALIGNMENT
    if metadata.type_name(key) != "uint32":
        cursor.fail(f"the alignment must be a uint32 but is {metadata.type_name(key)}", key)
    alignment = metadata.int_(key)
    if alignment == 0 or alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
        cursor.fail(f"the alignment {alignment} is not a power of two up to {MAX_ALIGNMENT}", key)
    return alignment


class TableRow(NamedTuple):
    """A row of the tensor table. `offset` counts from the start of the data section; `at` is the row's position."""

    name: str
    type: TensorType
    ne: tuple[int, int, int, int]
    offset: int
    nbytes: int
    at: int


def _read_tensors(cursor: Cursor, n_tensors: int, alignment: int) -> list[TableRow]:
    rows: list[TableRow] = []
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
        rows.append(TableRow(name, kind, ne, offset, nbytes, at))
    return rows


def place_tensors(cursor: Cursor, table: Table, shard: int) -> list[TensorInfo]:
    """Return the tensors with absolute offsets; raise if their data overlaps or exceeds the file."""
    rows = table.rows
    data_start = _data_start(cursor, table)
    data_size = max(cursor.size - data_start, 0)
    for name, _, _, offset, nbytes, at in rows:
        if offset + nbytes > data_size:
            cursor.truncated(
                f"the tensor needs data bytes {offset} to {offset + nbytes} and the file has {data_size}; "
                "it is damaged or was not fetched whole: fetch it again",
                name,
                at,
            )
    last_name, last_end = "", 0
    for name, _, _, offset, nbytes, at in sorted(rows, key=lambda row: row[3]):
        if offset < last_end:
            cursor.fail(f"the data overlaps that of tensor '{last_name}'", name, at)
        last_name, last_end = name, offset + nbytes
    return _tensor_infos(table, data_start, shard)


def _data_start(cursor: Cursor, table: Table) -> int:
    """Return the start of the tensor data; the cursor must be at the end of the header."""
    return -(-cursor.pos // table.alignment) * table.alignment


def _tensor_infos(table: Table, data_start: int, shard: int) -> list[TensorInfo]:
    return [
        TensorInfo(name, kind, ne, data_start + offset, nbytes, shard)
        for name, kind, ne, offset, nbytes, _ in table.rows
    ]


def _read_shape(cursor: Cursor, name: str) -> tuple[int, int, int, int]:
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


def _tensor_type(cursor: Cursor, name: str) -> TensorType:
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
