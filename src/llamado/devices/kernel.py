"""Kernels: their names, argument fields and the Python functions that emit their code."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Trace = Callable[..., None]


@dataclass(frozen=True)
class Kernel:
    """A kernel's name, its argument fields (8 bytes each) and the function that emits its code.

    The machine function is `void kernel(fields*, thread, threads, counters*, step)`; see `Work`.
    """

    name: str
    fields: tuple[str, ...]
    trace: Trace

    def pack(self, values: Mapping[str, Any], address: Callable[[Any], int] = int) -> list[int]:
        """Return argument values in field order as 64-bit integers: floats by the bits of their f32, places by
        `address`.
        """
        if len(values) != len(self.fields):
            raise ValueError(f"{self.name}: fields {sorted(set(self.fields) ^ values.keys())} missing or unknown")
        packed: list[int] = []
        for field in self.fields:
            value = values[field]
            kind = type(value)
            if kind is not int:
                value = _FLOAT.unpack(_f32(value))[0] if kind is float else address(value)
            packed.append(value)
        return packed


_F32, _FLOAT = struct.Struct("<f"), struct.Struct("<i")


def _f32(value: float) -> bytes:
    try:
        return _F32.pack(value)
    except OverflowError:  # finite, but too large for f32
        return _F32.pack(math.copysign(math.inf, value))


def kernel(*fields: str) -> Callable[[Trace], Kernel]:
    """Make a kernel of `trace(code, arguments, work, **parameters)`."""

    def wrap(trace: Trace) -> Kernel:
        return Kernel(trace.__name__, fields, trace)

    return wrap
