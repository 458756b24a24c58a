"""GGUF writer (version 3, little-endian): key-values as stored in another file, tensor data streamed.

The layout is that of `gguf.h`: magic, version, two counts, key-values, tensor table, padding, then each tensor's data
padded to the alignment. The file is written under a temporary name in the same folder and renamed when it is complete,
so a killed process never leaves a partial model under the requested name.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from mmap import ACCESS_READ
from mmap import mmap as MemoryMap
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from llamado.gguf.cursor import Cursor
from llamado.gguf.errors import GgufError
from llamado.gguf.header import DEFAULT_ALIGNMENT, MAGIC, MAX_KEY, key_spans
from llamado.gguf.metadata import StringArray, Value, ValueType
from llamado.gguf.pages import STEP, write_in_steps
from llamado.gguf.types import TensorType
from llamado.gguf.values import DTYPES, SCALARS

VERSION = 3
ALIGNMENT_KEY = "general.alignment"

Fields: TypeAlias = dict[str, bytes]
"""Key-values in file order; each value as stored: type, then bytes (`encode`)."""
Data: TypeAlias = "bytes | bytearray | memoryview | MemoryMap | NDArray[Any]"


class NewTensor(NamedTuple):
    """A tensor to be written. `ne[0]` is the fastest of up to four dimensions; trailing ones may be left out."""

    name: str
    type: TensorType
    ne: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Return the size of the data in bytes; raise ValueError if a row is not a whole number of blocks."""
        return self.type.row_bytes(self.ne[0]) * int(np.prod(self.ne[1:], dtype=np.int64))


def read_fields(path: str | os.PathLike[str]) -> Fields:
    """Return the key-values of a file (one shard), byte for byte. Raises GgufError."""
    with ExitStack() as stack:
        try:
            memory = MemoryMap(stack.enter_context(open(path, "rb")).fileno(), 0, access=ACCESS_READ)
        except (OSError, ValueError) as error:
            raise GgufError(f"cannot be opened: {error}", path=Path(path)) from error
        stack.enter_context(memory)
        return {key: memory[start:stop] for key, (start, stop) in key_spans(Cursor(memory, Path(path))).items()}


def encode(value: Value, kind: ValueType | None = None) -> bytes:
    """Encode a value as stored in a file: its type, then its bytes.

    `kind` is the type of a number, or of the elements of a list of numbers. Without it, a bool is BOOL, an int INT32, a
    float FLOAT32, and an array keeps the type of its elements. Raises ValueError if the value does not fit the type.
    """
    if isinstance(value, str):
        return _u32(ValueType.STRING) + _text(value.encode())
    if isinstance(value, StringArray):
        return b"".join(
            [_u32(ValueType.ARRAY), _u32(ValueType.STRING), _u64(len(value)), *map(_text, value.raw_list())]
        )
    if isinstance(value, (bool, int, float)):
        kind = kind if kind is not None else _kind_of(value)
        try:
            return _u32(kind) + SCALARS[kind].pack(value)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"{value!r} is no {kind.name.lower()}: {error}") from None
    if isinstance(value, list):
        if value and isinstance(value[0], str):
            return encode(StringArray.of([str(one) for one in value]))
        if value and isinstance(value[0], (list, np.ndarray, StringArray)):
            inner = [encode(one, kind)[4:] for one in value]  # without the ARRAY type word, which is stored once
            return b"".join([_u32(ValueType.ARRAY), _u32(ValueType.ARRAY), _u64(len(inner)), *inner])
        kind = kind if kind is not None else (_kind_of(value[0]) if value else ValueType.INT32)
        value = np.asarray(value, DTYPES[kind])
    if kind is None:
        kind = ValueType.BOOL if value.dtype.kind == "b" else next(k for k, t in DTYPES.items() if t == value.dtype)
    return b"".join(
        [_u32(ValueType.ARRAY), _u32(kind), _u64(len(value)), np.ascontiguousarray(value, DTYPES[kind]).tobytes()]
    )


def alignment_of(fields: Mapping[str, bytes]) -> int:
    """Return the data alignment of a file with these key-values."""
    given = fields.get(ALIGNMENT_KEY)
    return DEFAULT_ALIGNMENT if given is None else int.from_bytes(given[4:8], "little")


def header_bytes(fields: Mapping[str, bytes], tensors: Sequence[NewTensor]) -> bytes:
    """Return the bytes before the tensor data; the tensors' data follows in the given order."""
    alignment = alignment_of(fields)
    parts = [MAGIC, _u32(VERSION), _u64(len(tensors)), _u64(len(fields))]
    for key, value in fields.items():
        if not 0 < len(key.encode()) <= MAX_KEY:
            raise GgufError(f"a key has 1 to {MAX_KEY} bytes, not {len(key.encode())}", field=key[:80])
        parts += [_text(key.encode()), value]
    offset = 0
    for tensor in tensors:
        ne = list(tensor.ne)
        while len(ne) > 1 and ne[-1] == 1:
            ne.pop()
        parts += [_text(tensor.name.encode()), _u32(len(ne)), *map(_u64, ne), _u32(tensor.type), _u64(offset)]
        offset += padded(tensor.nbytes, alignment)
    whole = b"".join(parts)
    return whole + bytes(padded(len(whole), alignment) - len(whole))


def padded(n: int, alignment: int) -> int:
    """`n` rounded up to a multiple of `alignment`."""
    return -(-n // alignment) * alignment


class NewFile:
    """A file being written. `path` is replaced when the `with` block succeeds, and left as it was otherwise.

    Raises GgufError if the folder or the disk does not accept it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __enter__(self) -> NewFile:
        try:
            self._stream = tempfile.NamedTemporaryFile(
                buffering=STEP, dir=self.path.parent, prefix=f".{self.path.name}.", suffix=".part", delete=False
            )
        except OSError as error:
            raise GgufError(f"cannot be written: {error.strerror}", path=self.path) from error
        return self

    def write(self, data: Data) -> int:
        """Append bytes; return how many."""
        view = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1).view(np.uint8)
        try:
            write_in_steps(cast(BinaryIO, self._stream), view.data)
        except OSError as error:
            raise GgufError(f"cannot be written: {error.strerror}", path=self.path) from error
        return view.nbytes

    def pad(self, n: int) -> None:
        """Append `n` zeros."""
        self.write(bytes(n))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        name = self._stream.name
        try:
            if kind is None:
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(name, 0o666 & ~umask)  # temporary files are readable by their owner only
                self._stream.close()
                os.replace(name, self.path)
        except OSError as failed:
            raise GgufError(f"cannot be written: {failed.strerror}", path=self.path) from failed
        finally:
            with suppress(OSError):  # a full disk fails again here; the error is raised already
                self._stream.close()
            if os.path.exists(name):
                os.unlink(name)


def write_gguf(
    path: str | os.PathLike[str],
    fields: Mapping[str, bytes],
    tensors: Sequence[NewTensor],
    data: Iterable[Data | Iterable[Data]],
) -> None:
    """Write a file. `data` gives each tensor's bytes, whole or in pieces, consumed in order. Raises GgufError."""
    alignment = alignment_of(fields)
    with NewFile(path) as file:
        file.write(header_bytes(fields, tensors))
        for tensor, given in zip(tensors, data, strict=True):
            n = 0
            pieces = [given] if isinstance(given, (bytes, bytearray, memoryview, MemoryMap, np.ndarray)) else given
            for piece in pieces:
                n += file.write(piece)
            if n != tensor.nbytes:
                raise GgufError(f"got {n} bytes of data; expected {tensor.nbytes}", path=Path(path), field=tensor.name)
            file.pad(padded(n, alignment) - n)


def _kind_of(value: object) -> ValueType:
    if isinstance(value, bool):
        return ValueType.BOOL
    return ValueType.INT32 if isinstance(value, int) else ValueType.FLOAT32


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _text(raw: bytes) -> bytes:
    return _u64(len(raw)) + raw
