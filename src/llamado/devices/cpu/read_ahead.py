"""Read-ahead of mapped weights that are larger than memory, while a program computes.

A program reads its weights in one order, again and again. If they do not fit, the OS evicts the least recently used
pages, which are the ones needed next, so that every token reads the whole file. Therefore programs get additional
operations:

- The first part of every matrix stays in memory, as much as fits; the rest is released right after use, so that it does
  not evict what stays. Each token then reads only the rest, spread evenly over the program.
- A window of bytes ahead of the computation is requested from the OS, also across the end of the program.
- Only the chosen experts are read: all their matrices are requested once the choice is known. The OS decides which
  experts stay, because the next choice is unknown.

These are ordinary operations, run by the thread that takes them. Programs whose weights fit have none.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from llamado.devices.compile.program import ByteSpan, Operation, Place
from llamado.devices.cpu.kernels import paging
from llamado.devices.cpu.memory import CpuBuffer

log = logging.getLogger("llamado.devices")

WINDOW = 64 << 20
"""Bytes requested ahead of the computation."""
_SPARE = 256 << 20
"""Most bytes left for other uses: if the OS has to reclaim pages, it takes those that are needed next."""
_PAGE = mmap.PAGESIZE


class MappedFile(NamedTuple):
    """Addresses `start` to `stop` are a shared mapping of a file from byte `offset` on."""

    start: int
    stop: int
    offset: int
    file: int


class ReadAhead:
    """Weights in mapped files, and the read-ahead operations of programs that use them.

    `free`: returns the bytes of memory that this process may still use for weights.
    """

    def __init__(self, free: Callable[[], int], window: int = WINDOW) -> None:
        self._free, self._window = free, window
        self._weights: WeakSet[CpuBuffer] = WeakSet()
        self._files: list[MappedFile] = []
        self._mapped = self._room = 0
        self.stale = False
        """True if weights were added since `assess`."""

    def add(self, weights: Iterable[CpuBuffer]) -> None:
        """Add weights that programs will read in place."""
        self._weights.update(weights)
        self.stale = True

    def assess(self) -> None:
        """Find the mapped files and the available memory. Call it only without compiled programs, which refer to the
        result.
        """
        self.close()
        self.stale = False
        if sys.platform != "linux" or not self._weights:
            return
        sizes = sorted((w.address, w.size) for w in self._weights if w.size)
        self._files = [*_mapped_files(sizes)]
        self._mapped = sum(size for address, size in sizes if self._file(address) is not None)
        if not self._mapped:
            return
        self._room = self._free()
        if self._over:
            log.info(
                "%.2f GB of weights do not fit the %.2f GB of memory available for them: the rest is read "
                "from disk when needed",
                self._mapped / 1e9,
                self._room / 1e9,
            )

    @property
    def _over(self) -> bool:
        return self._mapped > self._room

    def close(self) -> None:
        """Close the files."""
        for mapped in self._files:
            os.close(mapped.file)
        self._files, self._mapped, self._room = [], 0, 0

    def add_to(self, operations: list[Operation]) -> list[Operation]:
        """Return a program's operations with those that request and release weights in between."""
        if not self._over:
            return operations
        before, after = self._dense(operations)
        for i, asked in _expert_prefetches(operations, self._is_mapped):
            before[i].append(asked)
        woven: list[Operation] = []
        for i, operation in enumerate(operations):
            woven += [*before[i], operation, *after[i]]
        return woven

    def _file(self, address: int) -> MappedFile | None:
        return next((m for m in self._files if m.start <= address < m.stop), None)

    def _is_mapped(self, span: ByteSpan) -> bool:
        return span.place.base is None and span.size > 0 and self._file(span.place.offset) is not None

    def _dense(self, operations: Sequence[Operation]) -> tuple[list[list[Operation]], list[list[Operation]]]:
        """Operations before and after each operation for the weights that every run reads."""
        before: list[list[Operation]] = [[] for _ in operations]
        after: list[list[Operation]] = [[] for _ in operations]
        reads = [
            _WeightRead(i, span.place.offset, span.size)
            for i, operation in enumerate(operations)
            if "w" in operation.fields and _choice(operation) is None
            for span in operation.reads
            if self._is_mapped(span)
        ]
        if not reads:
            return before, after
        self._divide(reads, operations)
        streamed = any(read.rest for read in reads)
        sizes = [read.rest if streamed else read.size for read in reads]
        window, cycle = min(self._window, sum(sizes) // 2), sum(sizes)
        # start of each read in the sequence of all reads, run twice
        starts, at = [], 0
        for size in [*sizes, *sizes]:
            starts.append(at)
            at += size
        asked = next(j for j, start in enumerate(starts) if start >= window)
        for read, start in zip(reads, starts, strict=False):
            while asked < len(reads) + len(sizes) and starts[asked] <= start + window:
                due = reads[asked % len(reads)]
                before[read.operation].append(_prefetch(due.start, due.size))
                asked += 1
        for read in reads:
            if read.rest:
                after[read.operation].append(self._release(read, operations[read.operation]))
        while asked < len(starts) and starts[asked] < cycle + window:  # the first reads of the next run
            due = reads[asked % len(reads)]
            after[reads[-1].operation].append(_prefetch(due.start, due.size))
            asked += 1
        return before, after

    def _divide(self, reads: Sequence[_WeightRead], operations: Sequence[Operation]) -> None:
        """Set `rest` of each read: the bytes that do not stay in memory."""
        chosen = {(s.place.offset, s.size) for o in operations if _choice(o) for s in o.reads if self._is_mapped(s)}
        tables = {
            s.place.offset for o in operations if "w" not in o.fields for s in o.reads if self._is_mapped(s)
        }  # tables: any of their rows may be read
        dense, experts = sum(read.size for read in reads), sum(size for _, size in chosen)
        room = self._room - min(self._room // 8, _SPARE) - self._window - max(0, self._mapped - dense - experts)
        if experts:
            room = min(room, room * 3 // 4)
        whole = [read for read in reads if read.start in tables]
        if 2 * sum(read.size for read in whole) <= room:
            room -= sum(read.size for read in whole)
        else:
            whole = []
        rest = [read for read in reads if read not in whole]
        # two matrices at a time, the one in use and the next one, have nothing released yet
        most = 2 * max((read.size for read in rest), default=0)
        total = sum(read.size for read in rest)
        share = 1.0 if total <= room else min(1.0, max(0.0, (room - most) / max(1, total - most)))
        for read in rest:
            stays = -(-(read.start + int(read.size * share)) // _PAGE) * _PAGE - read.start
            read.rest = max(0, read.size - stays) if share < 1 else 0

    def _release(self, read: _WeightRead, operation: Operation) -> Operation:
        start = read.start + read.size - read.rest
        size = (read.start + read.size) // _PAGE * _PAGE - start
        mapped = self._file(start)
        assert mapped is not None
        fields: dict[str, int | float | Place] = {
            "start": start,
            "size": max(0, size),
            "file": mapped.file,
            "offset": mapped.offset + start - mapped.start,
        }
        # a written result shows that the product is done
        return Operation(paging.release, {}, fields, list(operation.writes), [], label="release")


@dataclass(eq=False)
class _WeightRead:
    """A weight that an operation reads entirely; its last `rest` bytes do not stay in memory."""

    operation: int
    start: int
    size: int
    rest: int = field(default=0)


def _prefetch(start: int, size: int) -> Operation:
    return Operation(paging.prefetch, {"page": _PAGE}, {"start": start, "size": size}, [], [], label="prefetch")


def _choice(operation: Operation) -> Place | None:
    """The place of an operation's choice of experts, known only at run time; None: it reads all its weights."""
    place = operation.fields.get("routes", operation.fields.get("ids"))
    if "expert_bytes" not in operation.fields or not isinstance(place, tuple):
        return None
    return place if any(span.place == place for span in operation.reads) else None


def _expert_prefetches(
    operations: Sequence[Operation], is_mapped: Callable[[ByteSpan], bool]
) -> Iterator[tuple[int, Operation]]:
    """Yield operations that request chosen experts, each with the number of the operation it precedes.

    For one token, all requests come before the first product with the choice; for many tokens, which choose most
    experts, one product ahead.
    """
    seen: dict[Place, list[int]] = {}
    for i, operation in enumerate(operations):
        place = _choice(operation)
        if place is None:
            continue
        users = seen.setdefault(place, [])
        users.append(i)
        routed = "routes" in operation.fields
        kernel = paging.prefetch_routed if routed else paging.prefetch_chosen
        before = users[-2] if routed and len(users) > 1 else users[0]
        named = {key: operation.fields[key] for key in kernel.fields if key != "w"}
        reads = [span for span in operation.reads if span.place == place]
        for span in operation.reads:
            if is_mapped(span):
                yield (
                    before,
                    Operation(kernel, {"page": _PAGE}, {**named, "w": span.place}, reads, [], label="prefetch"),
                )


def _mapped_files(spans: Sequence[tuple[int, int]]) -> Iterator[MappedFile]:
    """Yield the shared file mappings that contain one of `spans` (address, size), with the files opened again."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        where, mode, offset, _, _, *name = line.split(maxsplit=5)
        start, stop = (int(part, 16) for part in where.split("-"))
        if mode[3] != "s" or not name or not any(start <= address < stop for address, _ in spans):
            continue
        try:
            yield MappedFile(start, stop, int(offset, 16), os.open(name[0], os.O_RDONLY))
        except OSError as error:
            log.debug("%s: not read ahead: %s", name[0], error)
