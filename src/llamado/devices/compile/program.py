"""Operations of a compiled graph, and the plan of their memory.

An operation names the memory it reads and writes. That alone decides the placement of activations: memory is reused
after its last reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from llamado.devices.first_fit import FOREVER, Lifetime, place
from llamado.devices.kernel import Kernel

_ALIGN = 64
_LINGER = 2
"""Operations during which freed memory is not reused: immediate reuse would only add a barrier."""


@dataclass(eq=False)
class Temporary:
    """Memory that the plan places: an activation, or an intermediate result that a kernel makes for another."""

    size: int
    keep: bool = False  # readable after the program has run
    first: int = -1
    last: int = -1
    offset: int = 0


@dataclass(eq=False)
class Constant:
    """Numbers that exist before the graph runs. The device that runs it provides their address."""

    values: NDArray[Any]


class Place(NamedTuple):
    """An address: `offset` bytes into a temporary or a constant, or absolute if `base` is None."""

    base: Temporary | Constant | None
    offset: int


class ByteSpan(NamedTuple):
    """`size` bytes from a place, read or written."""

    place: Place
    size: int


@dataclass
class Operation:
    """One kernel call; fields are numbers or places."""

    kernel: Kernel
    parameters: dict[str, Any]
    fields: dict[str, int | float | Place]
    reads: list[ByteSpan]
    writes: list[ByteSpan]
    address: int = 0
    label: str = ""


def plan(operations: list[Operation]) -> int:
    """Place every temporary; return the size of the arena."""
    temporaries: dict[Temporary, None] = {}
    for i, operation in enumerate(operations):
        for span in (*operation.reads, *operation.writes):
            base = span.place.base
            if isinstance(base, Temporary):
                if base.first < 0:
                    base.first = i
                    temporaries[base] = None
                base.last = i
    lives = [Lifetime(t.first, FOREVER if t.keep else t.last, t.size) for t in temporaries]
    size, offsets = place(lives, alignment=_ALIGN, linger=_LINGER)
    for temporary, offset in zip(temporaries, offsets, strict=True):
        temporary.offset = offset
    return size
