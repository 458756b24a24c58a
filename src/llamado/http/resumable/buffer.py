"""The last bytes of one stream, for readers that come and go while it is written."""

from __future__ import annotations

import asyncio
import time

from llamado.errors import LlamadoError

_PART = 64 * 1024  # bytes that a reader gets at a time


class StreamLost(LlamadoError):
    """The rest of a stream cannot be read: its bytes were dropped, or its writer failed."""


class StreamBuffer:
    """The last bytes of one stream. Writing never waits for a reader; event loop only."""

    def __init__(self, id: bytes) -> None:
        self.id = id
        self.media_type = "text/event-stream"
        self.started_at = int(time.time())
        self.completed_at = 0
        """Unix time of its end; 0 before it."""
        self.first = 0
        """Offset of the oldest byte that is kept."""
        self.is_done = False
        self.is_stopped = False
        """True if a client stopped it, by DELETE or by another request of its conversation."""
        self.n_readers = 1
        """Clients that read it, with the one that requested it."""
        self.left_at = 0
        """Bytes that were written when its last reader left."""
        self._stop = asyncio.Event()
        self._data = bytearray()
        self._was_cut = False
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return len(self._data)

    @property
    def end(self) -> int:
        """Bytes that were written."""
        return self.first + len(self._data)

    def append(self, data: bytes, limit: int) -> None:
        """Write bytes, and keep the last `limit` bytes. Does nothing after the end."""
        if self.is_done:
            return
        self._data += data
        self.shrink(limit)
        self._wake()

    def shrink(self, limit: int) -> None:
        """Drop the oldest bytes above `limit`."""
        excess = max(0, len(self._data) - limit)
        del self._data[:excess]
        self.first += excess

    def finish(self, *, was_cut: bool = False) -> None:
        """End the stream. `was_cut`: its writer failed. Only the first call counts."""
        if not self.is_done:
            self.is_done, self._was_cut = True, was_cut
            self.completed_at = int(time.time())
            self._wake()

    def stop(self) -> None:
        """End the stream and stop its writer."""
        self.is_stopped = True
        self._stop.set()
        self.finish()

    def release(self) -> None:
        """Drop all but the last part, which readers may still get. Called once no client can find the stream."""
        self.shrink(_PART)

    async def wait_for_stop(self) -> None:
        """Wait until a client stops the stream."""
        await self._stop.wait()

    async def read(self, offset: int) -> bytes:
        """Return the next bytes from `offset` as soon as there are some, or b"" at the end. Raises StreamLost."""
        while True:
            if offset < self.first:
                raise StreamLost(f"the bytes from {offset} on were dropped")
            at = offset - self.first
            if at < len(self._data):
                return bytes(memoryview(self._data)[at : at + _PART])
            if self.is_done:
                if self._was_cut:
                    raise StreamLost("its writer failed")
                return b""
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(changed)
            try:
                await changed
            finally:
                self._waiting.discard(changed)

    def _wake(self) -> None:
        for changed in self._waiting:
            if not changed.done():
                changed.set_result(None)
