"""Payload layouts: the values of a message as little-endian packed bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from llamado.rpc.wire.messages import MAX_ENDPOINT, TENSOR, TICKET_BYTES, WireTensor

_TENSOR_BYTES = TENSOR.itemsize


class Layout(Protocol):
    """The bytes of one payload. `size` is their number, None if it varies."""

    @property
    def size(self) -> int | None: ...

    def pack(self, values: Sequence[Any]) -> bytes:
        """Return the values of a message as bytes."""

    def unpack(self, payload: bytes) -> Sequence[Any]:
        """Return the values in a payload whose size has no fault."""

    def fault(self, size: int) -> str | None:
        """Return the expected size in words if a payload cannot have `size` bytes, None if it can."""


class _FixedSize:
    """A layout of one size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def fault(self, size: int) -> str | None:
        return None if size == self.size else f"it has {self.size}"


class Numbers(_FixedSize):
    """Numbers and byte strings of fixed sizes, in the format of `struct`. Further values are not packed."""

    def __init__(self, form: str) -> None:
        self._struct = struct.Struct("<" + form)
        self._count = _count(self._struct)
        super().__init__(self._struct.size)

    def pack(self, values: Sequence[Any]) -> bytes:
        return self._struct.pack(*values[: self._count])

    def unpack(self, payload: bytes | bytearray | memoryview, at: int = 0) -> tuple[Any, ...]:
        return self._struct.unpack_from(payload, at)


class TensorNumbers(_FixedSize):
    """A tensor, then numbers: the messages that move data. Further values are not packed."""

    def __init__(self, form: str = "") -> None:
        self._struct = struct.Struct("<" + form)
        self._end = 1 + _count(self._struct)
        super().__init__(_TENSOR_BYTES + self._struct.size)

    def pack(self, values: Sequence[Any]) -> bytes:
        packed: bytes = values[0].pack()
        return packed + self._struct.pack(*values[1 : self._end])

    def unpack(self, payload: bytes) -> tuple[Any, ...]:
        return WireTensor.unpack(payload), *self._struct.unpack_from(payload, _TENSOR_BYTES)


def _count(form: struct.Struct) -> int:
    """Return the number of values of a format."""
    return len(form.unpack(bytes(form.size)))


class Field:
    """One value of `Fields`: its size in bytes and both conversions."""

    def __init__(self, size: int, pack: Callable[[Any], bytes], unpack: Callable[[bytes, int], Any]) -> None:
        self.size, self.pack, self.unpack = size, pack, unpack


def number(form: str) -> Field:
    """Return a field of one number or byte string, in the format of `struct`."""
    one = struct.Struct("<" + form)
    return Field(one.size, one.pack, lambda payload, at: one.unpack_from(payload, at)[0])


def name(size: int) -> Field:
    """Return a field of `size` bytes of text, padded with zeros. Longer text is cut."""
    return Field(
        size,
        lambda value: value[:size].ljust(size, b"\0"),
        lambda payload, at: payload[at : at + size].split(b"\0", 1)[0],
    )


def tensors(most: int) -> Field:
    """Return a field of `most` tensors. Missing ones are zeros."""
    size = most * _TENSOR_BYTES
    return Field(
        size,
        lambda values: b"".join([tensor.pack() for tensor in values]).ljust(size, b"\0"),
        lambda payload, at: tuple([WireTensor.unpack(payload, at + i * _TENSOR_BYTES) for i in range(most)]),
    )


U32, U64 = number("I"), number("Q")
ONE_TENSOR = Field(_TENSOR_BYTES, lambda tensor: tensor.pack(), WireTensor.unpack)


class Fields(_FixedSize):
    """One field after another."""

    def __init__(self, *fields: Field) -> None:
        self._fields = fields
        super().__init__(sum(field.size for field in fields))

    def pack(self, values: Sequence[Any]) -> bytes:
        return b"".join([field.pack(value) for field, value in zip(self._fields, values, strict=True)])

    def unpack(self, payload: bytes, at: int = 0) -> list[Any]:
        values = []
        for field in self._fields:
            values.append(field.unpack(payload, at))
            at += field.size
        return values


class Entries:
    """A list of at least one entry."""

    size = None

    def __init__(self, kind: Callable[..., Any], entry: Fields) -> None:
        self._kind, self._entry = kind, entry

    def pack(self, values: Sequence[Any]) -> bytes:
        (entries,) = values
        return b"".join([self._entry.pack(entry) for entry in entries])

    def unpack(self, payload: bytes) -> tuple[Any, ...]:
        starts = range(0, len(payload), self._entry.size)
        return (tuple([self._kind(*self._entry.unpack(payload, at)) for at in starts]),)

    def fault(self, size: int) -> str | None:
        return None if size and size % self._entry.size == 0 else f"each of its entries has {self._entry.size}"


class TicketEndpoint:
    """A ticket, then an endpoint as text up to the end."""

    size = None

    def pack(self, values: Sequence[Any]) -> bytes:
        ticket, endpoint = values
        joined: bytes = ticket + endpoint
        return joined

    def unpack(self, payload: bytes) -> tuple[bytes, bytes]:
        return payload[:TICKET_BYTES], payload[TICKET_BYTES:]

    def fault(self, size: int) -> str | None:
        if TICKET_BYTES < size <= TICKET_BYTES + MAX_ENDPOINT:
            return None
        return f"it has a ticket and up to {MAX_ENDPOINT} of an endpoint"
