"""Memory of a card: its buffers, and copies between them and the host.

Copies run in the card's own stream, in order with its kernels. They go through pinned memory, which the card reads and
writes while the CPU goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cuda.driver import Card, Event, PinnedMemory
from llamado.devices.device import Bytes, DeviceError, LoadProgress

STAGING = 16 << 20
"""Bytes of each of the two pinned buffers that writes go through."""
READS = 32 << 20
"""Bytes of pinned memory for reads that are under way. A read that finds no room there waits for the card."""
_ALIGNMENT = 256
_SLACK = 64
"""Bytes after a buffer: kernels load eight elements at a time, also in the last row of a mask of odd length."""


class CudaBuffer:
    """Zeroed memory of a card. `address`: of its first byte, aligned to 256 bytes; 0 if it is empty."""

    memory: Bytes | None = None

    def __init__(self, card: Card, size: int) -> None:
        self.size, self.address = size, 0
        self._card = card
        if size:
            self.address = card.allocate(size + _SLACK)
            card.zero(self.address, size + _SLACK)

    def lock(self) -> bool:
        """Return True: memory of a card is never swapped out."""
        return True

    def free(self) -> None:
        """Release the memory, once all submitted work is done. Callable from any thread."""
        address, self.address, self.size = self.address, 0, 0
        if address:
            self._card.free(address)


class Transfers:
    """Copies between the host and a card's memory.

    Methods are called from one thread at a time. Close it before the card.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._staging = _StagingBuffers(card)
        self._ring: _Ring | None = None
        self._reads: SimpleQueue[_Read | None] = SimpleQueue()
        self._events: list[Event] = []
        self._reader: threading.Thread | None = None

    def write(self, address: int, data: NDArray[Any], progress: LoadProgress | None = None) -> None:
        """Copy the bytes of an array to the card. The array may change once this returns.

        A mapped file is read piece by piece, while the card copies the piece before.
        """
        source = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        at = 0
        while at < source.size:
            n = self._staging.write(address + at, source[at:])
            at += n
            if progress is not None:
                progress(n)

    def read(self, address: int, size: int) -> Future[Bytes]:
        """Read bytes as they are after all submitted work.

        Callbacks of the future run on the reading thread and must not wait for another read.
        """
        future: Future[Bytes] = Future()
        future.set_running_or_notify_cancel()
        if self._reader is None:
            self._ring = _Ring(self._card)
            self._reader = threading.Thread(target=self._finish_reads, name=f"reads of {self._card.name}", daemon=True)
            self._reader.start()
        assert self._ring is not None
        target = self._ring.take(size)
        if target is None:
            data = np.empty(size, np.uint8)
            self._card.download(address, data)
            self._card.stream.synchronize()
            future.set_result(data)
            return future
        event, failure = None, None
        try:
            event = self._events.pop() if self._events else Event(self._card)
            self._card.download(address, target)
            event.record()
        except DeviceError as error:
            failure = error
        self._reads.put(_Read(future, target, event, failure))
        return future

    def _finish_reads(self) -> None:
        """Thread: complete reads in the order in which they were submitted."""
        assert self._ring is not None
        while (read := self._reads.get()) is not None:
            failure = read.failure
            try:
                if read.event is not None and failure is None:
                    read.event.synchronize()
            except DeviceError as error:
                failure = error
            data = read.target.copy()
            self._ring.release()
            if read.event is not None:
                self._events.append(read.event)
            if failure is None:
                read.future.set_result(data)
            else:
                read.future.set_exception(failure)

    def close(self) -> None:
        """Complete all reads, and release the pinned memory."""
        if self._reader is not None:
            self._reads.put(None)
            self._reader.join()
        with suppress(DeviceError):  # a lost card copies nothing any more
            self._card.stream.synchronize()
        for event in self._events:
            event.free()
        if self._ring is not None:
            self._ring.free()
        self._staging.free()
        self._reader, self._ring, self._events = None, None, []


class _Read(NamedTuple):
    """A read under way: `target` has its bytes once `event` is reached."""

    future: Future[Bytes]
    target: Bytes
    event: Event | None
    failure: DeviceError | None
    """The error of submitting it."""


class _StagingBuffers:
    """Two pinned buffers. One is filled while the card copies the other."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._halves: list[tuple[PinnedMemory, Event]] = []
        self._used = 0

    def write(self, address: int, source: Bytes) -> int:
        """Submit the copy of as many bytes as fit the current buffer. Return their number."""
        if not self._halves:
            self._halves = [(self._card.pinned(STAGING), Event(self._card)) for _ in range(2)]
        memory, copied = self._halves[0]
        if not self._used:
            copied.synchronize()
        n = min(source.size, STAGING - self._used)
        piece = memory.bytes[self._used : self._used + n]
        piece[:] = source[:n]
        self._card.upload(address, piece)
        self._used += -(-n // _ALIGNMENT) * _ALIGNMENT
        if self._used >= STAGING:
            copied.record()
            self._halves.reverse()
            self._used = 0
        return n

    def free(self) -> None:
        """Release the buffers, whose copies are done."""
        for memory, copied in self._halves:
            memory.free()
            copied.free()
        self._halves, self._used = [], 0


class _Ring:
    """Pinned memory that is handed out in a circle, and released in the order in which it was taken."""

    def __init__(self, card: Card) -> None:
        self._memory = card.pinned(READS)
        self._lock = threading.Lock()
        self._starts: deque[int] = deque()
        """Positions of what is taken; a position is a count of bytes since the ring was last empty."""
        self._end = 0

    def take(self, n: int) -> Bytes | None:
        """Return `n` bytes, or None if there is no room for them."""
        with self._lock:
            if not self._starts:
                self._end = 0
            start = self._end
            left = READS - start % READS
            if n > left:  # they must be contiguous
                start += left
            first = self._starts[0] if self._starts else 0
            if start + n - first > READS:
                return None
            self._starts.append(start)
            self._end = start + -(-n // _ALIGNMENT) * _ALIGNMENT
        at = start % READS
        return self._memory.bytes[at : at + n]

    def release(self) -> None:
        """Release what was taken first."""
        with self._lock:
            self._starts.popleft()

    def free(self) -> None:
        """Release the memory."""
        self._memory.free()
