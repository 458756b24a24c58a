"""The resumable streams of a server, by conversation."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from llamado.http.resumable.buffer import StreamBuffer

log = logging.getLogger("llamado.server")

STREAM_BYTES = 4 * 2**20
"""Bytes that are kept of one stream, as in llama-server."""
KEEP_SECONDS = 300.0
"""Seconds that a stream is kept after its end, as in llama-server."""
MOST_STREAMS = 256
MOST_BYTES = 256 * 2**20
"""Bytes of all streams."""


class StreamRegistry:
    """The streams of a server: one for each conversation, limited in number, bytes and age; event loop only."""

    def __init__(
        self,
        *,
        most_streams: int = MOST_STREAMS,
        most_bytes: int = MOST_BYTES,
        stream_bytes: int = STREAM_BYTES,
        keep_seconds: float = KEEP_SECONDS,
    ) -> None:
        self._most_streams = most_streams
        self._most_bytes = most_bytes
        self._stream_bytes = stream_bytes
        self._keep_seconds = keep_seconds
        self._streams: dict[bytes, StreamBuffer] = {}
        self._finished: dict[StreamBuffer, float] = {}
        """Times at which ended streams are dropped, the earliest first."""
        self._n_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, id: bytes) -> StreamBuffer | None:
        """Begin a stream, and stop the earlier one of its conversation. None: too many streams are being written."""
        self.stop(id)
        if len(self._streams) >= self._most_streams:
            if not self._finished:
                log.warning("resumable streams: %d are being written; this one cannot be resumed", len(self._streams))
                return None
            self._discard_finished()
        stream = self._streams[id] = StreamBuffer(id)
        return stream

    def find(self, id: bytes) -> StreamBuffer | None:
        """Return the stream of a conversation."""
        return self._streams.get(id)

    def append(self, stream: StreamBuffer, data: bytes) -> None:
        """Write to a stream. Drops ended streams, then the oldest bytes of this one, if there are too many bytes.

        Each stream keeps at least its share of all bytes, so that its reader can get the next ones. A stream is stopped
        once it has dropped bytes written after its last reader left: no client can resume it.
        """
        if self._streams.get(stream.id) is not stream:
            return
        wanted = min(stream.size + len(data), self._stream_bytes)
        while self._n_bytes - stream.size + wanted > self._most_bytes and self._finished:
            self._discard_finished()
        others = self._n_bytes - stream.size
        limit = max(self._most_bytes - others, self._most_bytes // self._most_streams)
        stream.append(data, min(self._stream_bytes, limit))
        self._n_bytes = others + stream.size
        if not stream.n_readers and stream.first > stream.left_at:
            log.info("resumable streams: one was stopped, because no client can get the rest any more")
            self.stop(stream.id)

    def finish(self, stream: StreamBuffer, *, was_cut: bool = False) -> None:
        """End a stream, which can be read for a while. `was_cut`: its writer failed."""
        stream.finish(was_cut=was_cut)
        if self._streams.get(stream.id) is stream:
            self._finished[stream] = asyncio.get_running_loop().time() + self._keep_seconds
            self._set_timer()

    def stop(self, id: bytes) -> None:
        """Stop and drop the stream of a conversation, if there is one."""
        stream = self._streams.get(id)
        if stream is not None:
            stream.stop()
            self.discard(stream)

    def discard(self, stream: StreamBuffer) -> None:
        """Drop a stream and end its readers. Idempotent."""
        if self._streams.get(stream.id) is stream:
            del self._streams[stream.id]
            self._n_bytes -= stream.size
            self._finished.pop(stream, None)
        stream.finish()
        stream.release()

    def _discard_finished(self) -> None:
        """Drop the oldest ended stream; one that a client still reads only if there is no other."""
        unread = (stream for stream in self._finished if not stream.n_readers)
        self.discard(next(unread, None) or next(iter(self._finished)))

    def leave(self, stream: StreamBuffer) -> None:
        """Count a reader that left. During shutdown a stream without readers ends: no client can come back for it."""
        stream.n_readers -= 1
        stream.left_at = stream.end
        if self._closed and not stream.n_readers and self.find(stream.id) is stream:
            self.stop(stream.id)

    def close(self) -> None:
        """Stop the streams that no client reads, from now on too: the server is shutting down."""
        self._closed = True
        for stream in [stream for stream in self._streams.values() if not stream.n_readers]:
            self.stop(stream.id)

    def look_up(self, ids: Iterable[bytes]) -> list[dict[str, Any]]:
        """Return the state of each stream whose id is one of `ids`, or one of them followed by `::` and more."""
        known = sorted(self._streams)
        found: dict[bytes, None] = {}
        for id in ids:
            if id in self._streams:
                found[id] = None
            prefix = id + b"::"
            for other in known[bisect_left(known, prefix) :]:
                if not other.startswith(prefix):
                    break
                found[other] = None
        return [
            stream_state(
                stream.id, total_bytes=stream.end, started_at=stream.started_at, completed_at=stream.completed_at
            )
            for stream in map(self._streams.__getitem__, found)
        ]

    def _set_timer(self) -> None:
        if self._timer is None and self._finished:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(next(iter(self._finished.values())), self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for stream in [stream for stream, end in self._finished.items() if end <= now]:
            self.discard(stream)
        self._set_timer()


def stream_state(id: bytes, *, total_bytes: int = 0, started_at: int, completed_at: int = 0) -> dict[str, Any]:
    """Return a stream's entry in the response to a lookup. `completed_at`: 0 while it is written."""
    return {
        "conversation_id": id.decode("utf-8", "replace"),
        "is_done": completed_at != 0,
        "total_bytes": total_bytes,
        "started_at": started_at,
        "completed_at": completed_at,
    }
