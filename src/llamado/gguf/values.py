"""Read metadata values of a GGUF file: numbers, strings, and arrays.

Every count is compared with the bytes that are left before anything is allocated for it, so a damaged file raises an
error and never exhausts memory.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.gguf.cursor import Cursor
from llamado.gguf.metadata import StringArray, Value, ValueType

# Our own limits: small objects cost Python far more than their bytes in the file.
MAX_NESTED_ARRAYS = 1 << 14
MAX_ARRAY_DEPTH = 4
MAX_STRINGS = 1 << 24  # per array; scanning that many takes two seconds

_U64 = struct.Struct("<Q")
SCALARS = {
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
DTYPES: dict[ValueType, np.dtype[Any]] = {
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
_MIN_ARRAY_BYTES = 4 + 8  # element type, count


@dataclass(slots=True)
class Budget:
    """Nested arrays that the rest of the file may still contain."""

    nested_arrays: int = MAX_NESTED_ARRAYS


def read_value_type(cursor: Cursor, field: str) -> ValueType:
    at = cursor.pos
    number = cursor.u32(field)
    try:
        return ValueType(number)
    except ValueError:
        cursor.fail(f"value type {number} is unknown; types 0 to {max(ValueType).value} exist", field, at)


def read_value(cursor: Cursor, field: str, kind: ValueType, budget: Budget, depth: int) -> tuple[Value, str]:
    """Read a value; return it and the name of its type."""
    if kind == ValueType.STRING:
        return cursor.raw(field).decode("utf-8", "replace"), "string"
    if kind != ValueType.ARRAY:
        layout = SCALARS[kind]
        cursor.need(layout.size, field)
        value: Value = layout.unpack_from(cursor.memory, cursor.pos)[0]
        cursor.pos += layout.size
        return value, kind.name.lower()
    if depth >= MAX_ARRAY_DEPTH:
        cursor.fail(f"arrays are nested more than {MAX_ARRAY_DEPTH} deep", field)
    element = read_value_type(cursor, field)
    type_name = f"array of {element.name.lower()}"
    if element == ValueType.STRING:
        return _read_strings(cursor, field), type_name
    if element == ValueType.ARRAY:
        n = cursor.count(field, _MIN_ARRAY_BYTES)
        if n > budget.nested_arrays:
            cursor.fail(f"more than {MAX_NESTED_ARRAYS} nested arrays", field)
        budget.nested_arrays -= n
        return [read_value(cursor, field, ValueType.ARRAY, budget, depth + 1)[0] for _ in range(n)], type_name
    return _read_numbers(cursor, field, element), type_name


def _read_numbers(cursor: Cursor, field: str, element: ValueType) -> NDArray[Any]:
    dtype = DTYPES[element]
    n = cursor.count(field, dtype.itemsize)
    if n == 0:
        return np.empty(0, np.bool_ if element == ValueType.BOOL else dtype)
    numbers = np.frombuffer(cursor.memory, dtype, n, cursor.pos)
    cursor.pos += n * dtype.itemsize
    if element == ValueType.BOOL:
        numbers = numbers != 0
    elif not numbers.flags.aligned:
        # Arrays in the metadata are unaligned; compiled code needs alignment.
        numbers = numbers.copy()
    numbers.flags.writeable = False
    return numbers


def _read_strings(cursor: Cursor, field: str) -> StringArray:
    n = cursor.count(field, 8, MAX_STRINGS)
    start = pos = cursor.pos
    # A vocabulary has 250,000 of these: the loop does one unpack, one addition and one append each. `unpack_from`
    # checks the bounds: it rejects an offset beyond the end.
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
    # The lengths are stored between the strings; removing their eight bytes leaves the strings end to end.
    np.subtract(bounds, start, out=offsets[1:])
    keep = np.ones(pos - start, np.bool_)
    for i in range(8):
        keep[offsets[:-1] + i] = False
    offsets[1:] -= 8 * np.arange(1, n + 1)
    return StringArray(np.frombuffer(memory, np.uint8, pos - start, start)[keep].tobytes(), offsets)
