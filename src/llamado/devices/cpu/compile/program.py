"""Programs: operations with planned memory, barriers and packed fields, ready for the threads.

An operation names the memory it reads and writes. That alone decides the placement of activations (memory is reused
after its last reader) and the barriers: one is needed only before an operation that touches memory written by another
one, or writes memory touched by another one, since the last barrier.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.jit import CodeSegment, Jit, Kernel
from llamado.devices.cpu.memory import cache_aligned_zeros
from llamado.devices.first_fit import FOREVER, Lifetime, place

_ALIGN = 64
_LINGER = 2
"""Operations during which freed memory is not reused: immediate reuse would only add a barrier."""

_REMEMBERED = 512
"""Spans since the last barrier that a new one is compared with; one more barrier costs less than more comparisons."""


@dataclass(eq=False)
class Temporary:
    """Memory that the plan places: an activation, or an intermediate result that a kernel makes for another."""

    size: int
    keep: bool = False  # readable after the program has run
    first: int = -1
    last: int = -1
    offset: int = 0


class Place(NamedTuple):
    """An address: `offset` bytes into a temporary, or absolute if `base` is None."""

    base: Temporary | None
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


@dataclass
class Program:
    """Operations ready to run, and the memory they need."""

    table: NDArray[np.int64]
    counters: NDArray[np.int64]
    """[threads and groups of them, operations]: see `Work`. Each thread's counters are on cache lines of its own."""
    fields: NDArray[np.int64]
    arena_size: int
    labels: list[str] = field(default_factory=list)
    code: list[CodeSegment] = field(default_factory=list)
    """The code that the kernels' addresses point into."""

    @property
    def barriers(self) -> int:
        """Number of barriers."""
        return int(self.table[:, 2].sum())


def plan(operations: list[Operation]) -> int:
    """Place every temporary; return the size of the arena."""
    temporaries: dict[Temporary, None] = {}
    for i, operation in enumerate(operations):
        for span in (*operation.reads, *operation.writes):
            base = span.place.base
            if base is not None:
                if base.first < 0:
                    base.first = i
                    temporaries[base] = None
                base.last = i
    lives = [Lifetime(t.first, FOREVER if t.keep else t.last, t.size) for t in temporaries]
    size, offsets = place(lives, alignment=_ALIGN, linger=_LINGER)
    for temporary, offset in zip(temporaries, offsets, strict=True):
        temporary.offset = offset
    return size


def link(operations: list[Operation], jit: Jit, arena: int, arena_size: int, n_counters: int) -> Program:
    """Pack planned operations for an arena at address `arena`; each gets `n_counters` counters."""
    table = np.zeros((len(operations), 3), np.int64)
    values: list[int] = []
    starts: list[int] = []
    since: list[tuple[int, int, bool]] = []
    code: dict[int, CodeSegment] = {}
    for i, operation in enumerate(operations):
        starts.append(len(values))
        values += operation.kernel.pack(operation.fields, lambda place: _address(place, arena))
        touched = [(*_absolute(span, arena), False) for span in operation.reads]
        touched += [(*_absolute(span, arena), True) for span in operation.writes]
        barrier = len(since) > _REMEMBERED or _conflict(touched, since)
        since = touched if barrier else since + touched
        table[i, 0], segment = jit.load(operation.kernel, **operation.parameters)
        code[id(segment)] = segment
        table[i, 2] = barrier
    fields = np.array(values or [0], np.int64)
    table[:, 1] = fields.ctypes.data + 8 * np.array(starts, np.int64)
    lines = (
        -(-max(len(operations), 1) // 8) | 1
    )  # odd: else all threads' counters of one operation map to the same cache set
    counters = cache_aligned_zeros(n_counters * 8 * lines).reshape(n_counters, 8 * lines)
    labels = [o.label or o.kernel.name for o in operations]
    return Program(table, counters, fields, arena_size, labels, [*code.values()])


def _conflict(touched: list[tuple[int, int, bool]], since: list[tuple[int, int, bool]]) -> bool:
    """Return True if one of `touched` (start, stop, written) overlaps one of `since`, and either is written."""
    for start, stop, write in touched:
        for began, stopped, wrote in since:
            if start < stopped and began < stop and (write or wrote):
                return True
    return False


def _address(place: Place, arena: int) -> int:
    base, offset = place
    return offset if base is None else arena + base.offset + offset


def _absolute(span: ByteSpan, arena: int) -> tuple[int, int]:
    start = _address(span.place, arena)
    return start, start + span.size
