"""Programs: planned operations with barriers and packed fields, ready for the threads.

The memory that operations name decides the barriers: one is needed only before an operation that touches memory written
by another one, or writes memory touched by another one, since the last barrier.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llamado.devices.compile.program import ByteSpan, Operation, Place, Temporary
from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.memory import cache_aligned_zeros

_REMEMBERED = 512
"""Spans since the last barrier that a new one is compared with; one more barrier costs less than more comparisons."""


@dataclass
class Program:
    """Operations ready to run, and the memory they need."""

    table: NDArray[np.int64]
    counters: NDArray[np.int64]
    """[threads and groups of them, operations]: see `Work`. Each thread's counters are on cache lines of its own."""
    fields: NDArray[np.int64]
    arena_size: int
    labels: list[str] = field(default_factory=list)
    code: list[object] = field(default_factory=list)
    """The code that the kernels' addresses point into."""

    @property
    def barriers(self) -> int:
        """Number of barriers."""
        return int(self.table[:, 2].sum())


def link(operations: list[Operation], jit: Jit, arena: int, arena_size: int, n_counters: int) -> Program:
    """Pack planned operations for an arena at address `arena`; each gets `n_counters` counters."""
    table = np.zeros((len(operations), 3), np.int64)
    values: list[int] = []
    starts: list[int] = []
    since: list[tuple[int, int, bool]] = []
    code: dict[int, object] = {}
    for i, operation in enumerate(operations):
        starts.append(len(values))
        values += operation.kernel.pack(operation.fields, lambda place: _address(place, arena))
        touched = [(*_absolute(span, arena), False) for span in operation.reads]
        touched += [(*_absolute(span, arena), True) for span in operation.writes]
        barrier = len(since) > _REMEMBERED or _conflict(touched, since)
        since = touched if barrier else since + touched
        table[i, 0], held = jit.load(operation.kernel, **operation.parameters)
        code[id(held)] = held
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
    if base is None:
        return offset
    start = arena + base.offset if isinstance(base, Temporary) else base.values.ctypes.data
    return start + offset


def _absolute(span: ByteSpan, arena: int) -> tuple[int, int]:
    start = _address(span.place, arena)
    return start, start + span.size
