"""The memory that a worker lends: regions of a device, a limit over all clients, and turns on the device.

A client knows a region by two numbers, neither of them an address: `ptr` names it, and its bytes are counted from
`base`. ggml does arithmetic on the latter (a tensor's `data` is base + offset), so regions do not overlap in it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from llamado.devices.device import Buffer, Device, DeviceError
from llamado.ggml.graph import Graph
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

PAGE = 4096
_FIRST_BASE = 1 << 32
"""Far from 0, which means "no memory" to ggml."""
_COPY = 4 << 20
"""Bytes moved at a time where a device's memory cannot be reached directly."""


class _Numbers:
    """Numbers by which clients know regions; no region of any device ever has those of another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ptr = 1
        self._base = _FIRST_BASE

    def take(self, size: int) -> tuple[int, int]:
        """`ptr` and `base` of a new region. The bases last for 2^31 regions of 2 GiB."""
        with self._lock:
            ptr, base = self._ptr, self._base
            self._ptr += 1
            self._base += size + PAGE  # a gap: what ends one region does not begin another
        return ptr, base


_numbers = _Numbers()


class Turns:
    """A lock that is given in the order in which it was asked for, so that clients take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()  # the one before gives it

    def try_enter(self) -> bool:
        """Takes the turn if nobody has it."""
        with self._lock:
            if self._taken:
                return False
            self._taken = True
            return True

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


class Region:
    """Bytes of a device that one client owns. `memory` is a view of them where they are this machine's."""

    __slots__ = ("alive", "base", "buffer", "lender", "memory", "ptr", "size")

    def __init__(self, lender: Lender, buffer: Buffer, ptr: int, base: int, size: int) -> None:
        self.lender, self.buffer = lender, buffer
        self.ptr, self.base, self.size = ptr, base, size
        self.alive = True
        self.memory = None if buffer.memory is None else buffer.memory.data[:size]

    def tensor(self, offset: int, size: int) -> Tensor:
        """`size` bytes at `offset` as a bound tensor."""
        tensor = Tensor(TensorType.I8, (size, 1, 1, 1), (1, size, size, size), name=f"buffer {self.ptr}")
        tensor.buffer, tensor.offset = self.buffer, offset
        return tensor

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Puts bytes at `offset`; the caller has checked that they fit."""
        if self.memory is not None:
            self.memory[offset : offset + len(data)] = data
        elif len(data):
            with self.lender.turns:
                self.lender.device.write(self.tensor(offset, len(data)), np.frombuffer(data, np.uint8))

    def fill(self, offset: int, size: int, value: int) -> None:
        """Sets bytes to `value`."""
        if self.memory is not None:
            np.frombuffer(self.memory, np.uint8)[offset : offset + size] = value
            return
        chunk = bytes([value]) * min(size, _COPY)
        for at in range(offset, offset + size, _COPY):
            self.write(at, memoryview(chunk)[: min(_COPY, offset + size - at)])

    def read(self, offset: int, size: int) -> Iterator[memoryview]:
        """The bytes from `offset` on, in one or more pieces."""
        if self.memory is not None:
            yield self.memory[offset : offset + size]
            return
        for at in range(offset, offset + size, _COPY):
            n = min(_COPY, offset + size - at)
            with self.lender.turns:
                future = self.lender.device.read(self.tensor(at, n), 0, n)
            yield np.ascontiguousarray(future.result()).data

    def write_pieces(self, offset: int, stride: int, data: memoryview, row: int) -> None:
        """Puts pieces of `row` bytes, which come without gaps, `stride` bytes apart from `offset` on."""
        for i in range(len(data) // row):
            self.write(offset + i * stride, data[i * row : (i + 1) * row])

    def read_pieces(self, offset: int, stride: int, rows: int, row: int) -> memoryview:
        """Pieces of `row` bytes, `stride` bytes apart from `offset` on, without gaps."""
        found = memoryview(bytearray(rows * row))
        at = 0
        for i in range(rows):
            for piece in self.read(offset + i * stride, row):
                found[at : at + len(piece)] = piece
                at += len(piece)
        return found

    def copy(self, offset: int, source: Region, start: int, size: int) -> None:
        """Copies bytes from another region, or this one (as if through a third place)."""
        if self.memory is not None and source.memory is not None:
            target = np.frombuffer(self.memory, np.uint8)
            target[offset : offset + size] = np.frombuffer(source.memory, np.uint8)[start : start + size]
        elif self.lender is source.lender:
            with self.lender.turns:
                self.lender.device.copy(source.tensor(start, size), self.tensor(offset, size))
        else:
            for piece in source.read(start, size):
                self.write(offset, piece)
                offset += len(piece)

    def free(self) -> None:
        """Gives the memory back. Nothing may use the region any more."""
        if self.alive:
            self.alive = False
            self.memory = None
            self.buffer.free()  # at once, whatever the device does now
            self.lender.give(self.size)


class Lender:
    """A device that is lent: at most `limit` bytes to all clients together, the working memory of their graphs counted,
    and to one client at a time for computing.

    Without a limit, what the device had free when it was opened is the limit.
    """

    def __init__(self, device: Device, limit: int | None) -> None:
        self.device = device
        self.turns = Turns()
        free, total = device.memory()
        self.limit = free if limit is None else limit
        self.total = total if limit is None else limit
        self._own_limit = limit is not None
        self._lock = threading.Lock()
        self._lent = 0
        self._working = 0
        device.reserve = self._reserve
        self._client: object = None
        self._handing_over = threading.Lock()
        self._unwanted: deque[Graph] = deque()
        self._reserved = False
        self._used = time.monotonic()
        self._rests = True

    @property
    def lent(self) -> int:
        """Bytes that clients have now."""
        return self._lent

    def memory(self) -> tuple[int, int]:
        """Bytes that a client could still get, and bytes in all."""
        free = self.limit - self._lent - self._working
        return max(0, min(free, self.device.memory()[0])), self.total

    def lend(self, size: int) -> Region | None:
        """Zeroed memory, None where there is no room for it."""
        cost = _pages(size)
        with self._lock:
            if cost > self.limit - self._lent - self._working:
                return None
            self._lent += cost
        whole = Tensor(TensorType.I8, (size, 1, 1, 1), (1, size, size, size), name="buffer")
        try:
            buffers = self.device.place([whole])
        except (DeviceError, MemoryError):
            self.give(size)
            return None
        return Region(self, buffers[0], *_numbers.take(cost), size)

    def give(self, size: int) -> None:
        """A region of `size` bytes is free again."""
        with self._lock:
            self._lent -= _pages(size)

    # --- computing --------------------------------------------------------------------------------------------------
    @contextmanager
    def turn(self, client: object) -> Iterator[None]:
        """The device is this client's until the block is left; `abandon` makes that soon."""
        with self.turns:
            with self._handing_over:
                self._client = client
            try:
                yield
            finally:
                with self._handing_over:
                    self._client = None
                self._used, self._rests = time.monotonic(), False
                self._tidy()
        self._sweep()  # what came while the turn was being given back

    def abandon(self, client: object) -> None:
        """Makes a client's graph that runs end soon; where it has not begun quite yet, nothing happens: come again."""
        with self._handing_over:  # it cannot be another's graph by the time the device hears of it
            if self._client is client:
                self.device.abandon()

    def forget(self, graphs: Iterable[Graph]) -> None:
        """These do not come again; the device is told when nobody computes."""
        self._unwanted.extend(graphs)
        self._sweep()

    def rest(self, after: float) -> None:
        """Working memory that nobody has used for `after` seconds is the system's until the next graph."""
        if self._rests or time.monotonic() - self._used < after:
            return
        if self.turns.try_enter():
            try:
                self.device.trim_memory()
                self._rests = True
            finally:
                self.turns.__exit__()

    def _sweep(self) -> None:
        while self._unwanted and self.turns.try_enter():
            try:
                self._tidy()
            finally:
                self.turns.__exit__()

    def _tidy(self) -> None:
        """Drops what is not wanted any more and counts the working memory anew; only in a turn."""
        if not (self._unwanted or self._reserved):
            return
        self.device.drop_graphs([self._unwanted.popleft() for _ in range(len(self._unwanted))])
        with self._lock:
            self._working, self._reserved = self.device.working_bytes, False

    def _reserve(self, size: int) -> None:
        """The device wants `size` bytes of working memory, which all graphs share."""
        with self._lock:
            room = self.limit - self._lent
            if size > room:
                raise DeviceError(
                    f"the graph needs {size / 1e6:.1f} MB of working memory, {max(room, 0) / 1e6:.1f} MB are left: "
                    "smaller batches need less, --mem may allow more"
                )
            self._working, self._reserved = size, True


def _pages(size: int) -> int:
    """What a region costs: whole pages, so that a million tiny ones cost something, too."""
    return max(1, -(-size // PAGE)) * PAGE
