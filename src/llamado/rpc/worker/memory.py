"""Shared devices: memory regions of clients, one memory limit over all clients, and turns to compute.

Two numbers identify a region on the wire, neither of them an address: `ptr` is its name, and its bytes are counted from
`base`. ggml does arithmetic on the latter (a tensor's `data` is base + offset), so the ranges of regions are disjoint.
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
"""Bytes moved at a time if this process cannot reach a device's memory directly."""


class _RegionNumbers:
    """Source of `ptr` and `base`, unique over all devices and never reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ptr = 1
        self._base = _FIRST_BASE

    def take(self, size: int) -> tuple[int, int]:
        """Return `ptr` and `base` of a new region. The bases last for 2^31 regions of 2 GiB."""
        with self._lock:
            ptr, base = self._ptr, self._base
            self._ptr += 1
            self._base += size + PAGE  # a gap, so that the end of one region is not the start of another
        return ptr, base


_numbers = _RegionNumbers()


class Turns:
    """A first-come, first-served lock, so that clients take turns."""

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
        mine.acquire()  # released by the holder before

    def try_enter(self) -> bool:
        """Acquire the lock if it is free."""
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
    """A client's bytes on a device. `memory` is a view of them if this process can reach them."""

    __slots__ = ("alive", "base", "buffer", "memory", "owner", "ptr", "size")

    def __init__(self, shared: SharedDevice, buffer: Buffer, ptr: int, base: int, size: int) -> None:
        self.owner, self.buffer = shared, buffer
        self.ptr, self.base, self.size = ptr, base, size
        self.alive = True
        self.memory = None if buffer.memory is None else buffer.memory.data[:size]

    def tensor(self, offset: int, size: int) -> Tensor:
        """Return `size` bytes at `offset` as a bound tensor."""
        tensor = Tensor(TensorType.I8, (size, 1, 1, 1), (1, size, size, size), name=f"buffer {self.ptr}")
        tensor.buffer, tensor.offset = self.buffer, offset
        return tensor

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at `offset`; the caller has checked that they fit."""
        if self.memory is not None:
            self.memory[offset : offset + len(data)] = data
        elif len(data):
            with self.owner.turns:
                self.owner.device.write(self.tensor(offset, len(data)), np.frombuffer(data, np.uint8))

    def fill(self, offset: int, size: int, value: int) -> None:
        """Set bytes to `value`."""
        if self.memory is not None:
            np.frombuffer(self.memory, np.uint8)[offset : offset + size] = value
            return
        chunk = bytes([value]) * min(size, _COPY)
        for at in range(offset, offset + size, _COPY):
            self.write(at, memoryview(chunk)[: min(_COPY, offset + size - at)])

    def read(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yield the bytes from `offset` on in one or more pieces."""
        if self.memory is not None:
            yield self.memory[offset : offset + size]
            return
        for at in range(offset, offset + size, _COPY):
            n = min(_COPY, offset + size - at)
            with self.owner.turns:
                future = self.owner.device.read(self.tensor(at, n), 0, n)
            yield np.ascontiguousarray(future.result()).data

    def write_pieces(self, offset: int, stride: int, data: memoryview, row: int) -> None:
        """Write rows of `row` bytes, gapless in `data`, `stride` bytes apart from `offset` on."""
        for i in range(len(data) // row):
            self.write(offset + i * stride, data[i * row : (i + 1) * row])

    def read_pieces(self, offset: int, stride: int, rows: int, row: int) -> memoryview:
        """Return rows of `row` bytes, `stride` bytes apart from `offset` on, without gaps."""
        found = memoryview(bytearray(rows * row))
        at = 0
        for i in range(rows):
            for piece in self.read(offset + i * stride, row):
                found[at : at + len(piece)] = piece
                at += len(piece)
        return found

    def copy(self, offset: int, source: Region, start: int, size: int) -> None:
        """Copy bytes from another region, or this one (they may overlap)."""
        if self.memory is not None and source.memory is not None:
            target = np.frombuffer(self.memory, np.uint8)
            target[offset : offset + size] = np.frombuffer(source.memory, np.uint8)[start : start + size]
        elif self.owner is source.owner:
            with self.owner.turns:
                self.owner.device.copy(source.tensor(start, size), self.tensor(offset, size))
        else:
            for piece in source.read(start, size):
                self.write(offset, piece)
                offset += len(piece)

    def free(self) -> None:
        """Free the memory. The region must not be used any more."""
        if self.alive:
            self.alive = False
            self.memory = None
            self.buffer.free()  # at once, even while the device computes
            self.owner.release(self.size)


class SharedDevice:
    """A device shared by clients: one computes at a time, and all together get `limit` bytes.

    Working memory of their graphs counts. Without a limit, the free memory at the start is the limit.
    """

    def __init__(self, device: Device, limit: int | None) -> None:
        self.device = device
        self.turns = Turns()
        free, total = device.memory()
        self.limit = free if limit is None else limit
        self.total = total if limit is None else limit
        self._own_limit = limit is not None
        self._lock = threading.Lock()
        self._allocated = 0
        self._working = 0
        device.reserve = self._reserve
        self._client: object = None
        self._handing_over = threading.Lock()
        self._dropped: deque[Graph] = deque()
        self._reserved = False
        self._used = time.monotonic()
        self._is_resting = True

    @property
    def allocated(self) -> int:
        """Bytes allocated to clients."""
        return self._allocated

    def memory(self) -> tuple[int, int]:
        """Return the bytes that a client could still get, and the total."""
        free = self.limit - self._allocated - self._working
        return max(0, min(free, self.device.memory()[0])), self.total

    def allocate(self, size: int) -> Region | None:
        """Allocate zeroed memory. Returns None if there is no room."""
        cost = _pages(size)
        with self._lock:
            if cost > self.limit - self._allocated - self._working:
                return None
            self._allocated += cost
        n = max(1, size)  # a card allocates nothing for an empty tensor
        whole = Tensor(TensorType.I8, (n, 1, 1, 1), (1, n, n, n), name="buffer")
        try:
            buffers = self.device.place([whole])
        except (DeviceError, MemoryError):
            self.release(size)
            return None
        return Region(self, buffers[0], *_numbers.take(cost), size)

    def release(self, size: int) -> None:
        """Count a freed region of `size` bytes."""
        with self._lock:
            self._allocated -= _pages(size)

    # --- computing --------------------------------------------------------------------------------------------------
    @contextmanager
    def turn(self, client: object) -> Iterator[None]:
        """Hold the device for a client during the block. `abandon` cuts its graph short."""
        with self.turns:
            with self._handing_over:
                self._client = client
            try:
                yield
            finally:
                with self._handing_over:
                    self._client = None
                self._used, self._is_resting = time.monotonic(), False
                self._tidy()
        self._sweep()  # graphs dropped while the turn ended

    def abandon(self, client: object) -> None:
        """Cut a client's running graph short. No effect before the graph has started: call again."""
        with self._handing_over:  # so that it cannot hit the next client's graph
            if self._client is client:
                self.device.abandon()

    def drop_graphs(self, graphs: Iterable[Graph]) -> None:
        """Release working memory that only these graphs used, once no client computes."""
        self._dropped.extend(graphs)
        self._sweep()

    def trim_memory(self, idle_s: float) -> None:
        """Return working memory to the system if it was unused for `idle_s` seconds."""
        if self._is_resting or time.monotonic() - self._used < idle_s:
            return
        if self.turns.try_enter():
            try:
                self.device.trim_memory()
                self._is_resting = True
            finally:
                self.turns.__exit__()

    def _sweep(self) -> None:
        while self._dropped and self.turns.try_enter():
            try:
                self._tidy()
            finally:
                self.turns.__exit__()

    def _tidy(self) -> None:
        """Drop graphs on the device and count the working memory again; only inside a turn."""
        if not (self._dropped or self._reserved):
            return
        self.device.drop_graphs([self._dropped.popleft() for _ in range(len(self._dropped))])
        with self._lock:
            self._working, self._reserved = self.device.working_bytes, False

    def _reserve(self, size: int) -> None:
        """Reserve `size` bytes of working memory, which all graphs share. Raises DeviceError if there is no room."""
        with self._lock:
            room = self.limit - self._allocated
            if size > room:
                raise DeviceError(
                    f"the graph needs {size / 1e6:.1f} MB of working memory, {max(room, 0) / 1e6:.1f} MB are left: "
                    "smaller batches need less, --mem may allow more"
                )
            self._working, self._reserved = size, True


def _pages(size: int) -> int:
    """Return the cost of a region in whole pages, so that a million tiny ones count, too."""
    return max(1, -(-size // PAGE)) * PAGE
