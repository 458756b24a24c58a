"""Key-value metadata of a GGUF file: value types, string arrays, and typed access with clear errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from llamado.gguf.errors import GgufError

D = TypeVar("D")


class ValueType(IntEnum):
    """Type of a metadata value as stored (gguf.h, `enum gguf_type`)."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


class StringArray(Sequence[str]):
    """Strings packed end to end; string i is `buffer[offsets[i]:offsets[i + 1]]`, decoded on access."""

    __slots__ = ("buffer", "offsets")

    def __init__(self, buffer: bytes, offsets: NDArray[np.int64]) -> None:
        self.buffer = buffer
        self.offsets = offsets

    @classmethod
    def of(cls, strings: Sequence[str | bytes]) -> StringArray:
        """Pack strings that are already in memory."""
        parts = [s.encode() if isinstance(s, str) else s for s in strings]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(p) for p in parts], out=offsets[1:])
        return cls(b"".join(parts), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, index: int) -> bytes:
        """Bytes of string `index` as stored, which need not be UTF-8."""
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return self.buffer[self.offsets[index] : self.offsets[index + 1]]

    def raw_list(self) -> list[bytes]:
        """All strings as bytes, several times faster than calling `raw` in a loop."""
        buffer, bounds = self.buffer, self.offsets.tolist()
        return [buffer[a:b] for a, b in pairwise(bounds)]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.raw(index).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        for raw in self.raw_list():
            yield raw.decode("utf-8", "replace")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StringArray):
            return self.buffer == other.buffer and np.array_equal(self.offsets, other.offsets)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings, {len(self.buffer)} bytes)"


Value: TypeAlias = "int | float | bool | str | NDArray[Any] | StringArray | list[Value]"


class Metadata(Mapping[str, Value]):
    """Metadata of a model: a mapping in file order, with typed accessors that raise `GgufError` naming the key."""

    def __init__(
        self,
        values: Mapping[str, Value],
        types: Mapping[str, str] | None = None,
        *,
        path: Path | str | None = None,
    ) -> None:
        self._values = dict(values)
        self._types = dict(types or {})
        self._path = path

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Metadata({len(self)} keys)"

    def with_values(self, values: Mapping[str, Value]) -> Metadata:
        """Return a copy with `values` replaced or added."""
        types = {key: name for key, name in self._types.items() if key not in values}
        return Metadata({**self._values, **values}, types, path=self._path)

    def type_name(self, key: str) -> str:
        """Stored type of a value: `uint32`, `string`, `array of float32` …; empty for values not read from a file."""
        return self._types.get(key, "")

    @overload
    def str_(self, key: str) -> str: ...
    @overload
    def str_(self, key: str, default: D) -> str | D: ...
    def str_(self, key: str, default: Any = ...) -> Any:
        """The string at `key`."""
        value = self._find(key, default)
        return value if value is default or isinstance(value, str) else self._type_error(key, "a string")

    @overload
    def int_(self, key: str) -> int: ...
    @overload
    def int_(self, key: str, default: D) -> int | D: ...
    def int_(self, key: str, default: Any = ...) -> Any:
        """The integer at `key`."""
        value = self._find(key, default)
        if value is default or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        return self._type_error(key, "an integer")

    @overload
    def float_(self, key: str) -> float: ...
    @overload
    def float_(self, key: str, default: D) -> float | D: ...
    def float_(self, key: str, default: Any = ...) -> Any:
        """The number at `key`; an integer is converted to float."""
        value = self._find(key, default)
        if value is default or isinstance(value, float):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        return self._type_error(key, "a number")

    @overload
    def bool_(self, key: str) -> bool: ...
    @overload
    def bool_(self, key: str, default: D) -> bool | D: ...
    def bool_(self, key: str, default: Any = ...) -> Any:
        """The truth value at `key`."""
        value = self._find(key, default)
        return value if value is default or isinstance(value, bool) else self._type_error(key, "a bool")

    @overload
    def ints(self, key: str, *, n: int | None = None) -> tuple[int, ...]: ...
    @overload
    def ints(self, key: str, default: D, *, n: int | None = None) -> tuple[int, ...] | D: ...
    def ints(self, key: str, default: Any = ..., *, n: int | None = None) -> Any:
        """The integers at `key`; with `n` (say, layers) a scalar is repeated, and an array must have n."""
        return self._numbers(key, default, n, "iu", "integers")

    @overload
    def floats(self, key: str, *, n: int | None = None) -> tuple[float, ...]: ...
    @overload
    def floats(self, key: str, default: D, *, n: int | None = None) -> tuple[float, ...] | D: ...
    def floats(self, key: str, default: Any = ..., *, n: int | None = None) -> Any:
        """The floats at `key`; `n` as in `ints`."""
        return self._numbers(key, default, n, "f", "floats")

    @overload
    def bools(self, key: str, *, n: int | None = None) -> tuple[bool, ...]: ...
    @overload
    def bools(self, key: str, default: D, *, n: int | None = None) -> tuple[bool, ...] | D: ...
    def bools(self, key: str, default: Any = ..., *, n: int | None = None) -> Any:
        """The truth values at `key`; `n` as in `ints`."""
        return self._numbers(key, default, n, "b", "bools")

    @overload
    def array(self, key: str) -> NDArray[Any]: ...
    @overload
    def array(self, key: str, default: D) -> NDArray[Any] | D: ...
    def array(self, key: str, default: Any = ...) -> Any:
        """The array of numbers at `key`, read-only, with its stored type."""
        value = self._find(key, default)
        return (
            value if value is default or isinstance(value, np.ndarray) else self._type_error(key, "an array of numbers")
        )

    @overload
    def strings(self, key: str) -> StringArray: ...
    @overload
    def strings(self, key: str, default: D) -> StringArray | D: ...
    def strings(self, key: str, default: Any = ...) -> Any:
        """The array of strings at `key`."""
        value = self._find(key, default)
        return (
            value
            if value is default or isinstance(value, StringArray)
            else self._type_error(key, "an array of strings")
        )

    def _find(self, key: str, default: Any) -> Any:
        value = self._values.get(key, default)
        if value is ...:
            raise GgufError(f"metadata key '{key}' is missing; the file is incomplete", path=self._path, field=key)
        return value

    def _numbers(self, key: str, default: Any, n: int | None, kinds: str, wanted: str) -> Any:
        value = self._find(key, default)
        if value is default:
            return value
        if isinstance(value, np.ndarray) and value.dtype.kind in kinds:
            if n is not None and len(value) != n:
                raise GgufError(
                    f"metadata key '{key}' has {len(value)} values; expected {n}", path=self._path, field=key
                )
            return tuple(value.tolist())
        # Scalars have numpy's kinds: bool "b", int "i", float "f".
        if n is not None and isinstance(value, (bool, int, float)) and np.min_scalar_type(value).kind in kinds:
            return (value,) * n
        return self._type_error(key, f"an array of {wanted}")

    def _type_error(self, key: str, wanted: str) -> Any:
        is_type = self._types.get(key) or type(self._values[key]).__name__
        raise GgufError(f"metadata key '{key}' must be {wanted} but is {is_type}", path=self._path, field=key)
