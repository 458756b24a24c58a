"""The last lines of the log, for `/logs`, and new ones as they come, for `/logs/stream`."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from llamado.loglines import LineFormatter

MODELS = "llamado.model"
"""Logger of everything that models' processes print; a model's own is below it."""
_KEPT = 256 * 1024  # bytes of history
_BEHIND = 1024  # lines a slow reader may be behind before it misses some


class LogFollower:
    """One that follows the log; `kind` is "" (all), "proxy", "upstream", or a model's name."""

    def __init__(self, tail: LogTail, kind: str) -> None:
        self._tail = tail
        self.kind = kind
        self._lines: asyncio.Queue[bytes] = asyncio.Queue(_BEHIND)

    def offer(self, line: bytes) -> None:
        """Take a line; event loop only."""
        if not self._lines.full():
            self._lines.put_nowait(line)

    async def read(self) -> bytes:
        """At least one new line."""
        lines = [await self._lines.get()]
        while not self._lines.empty():
            lines.append(self._lines.get_nowait())
        return b"".join(lines)

    def close(self) -> None:
        """Stop following."""
        self._tail.readers.discard(self)


class LogTail(logging.Handler):
    """A log handler that remembers; `loop` is where readers live."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(logging.INFO)
        self._loop = loop
        self._lines: deque[tuple[str, bytes]] = deque()
        self._size = 0
        self.readers: set[LogFollower] = set()
        self.setFormatter(LineFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line; any thread."""
        line = self.format(record).encode("utf-8", "replace") + b"\n"
        # Not part of the logger's name: a model's may hold dots.
        kind = getattr(record, "model", "")
        self._lines.append((kind, line))
        self._size += len(line)
        while self._size > _KEPT and self._lines:
            self._size -= len(self._lines.popleft()[1])
        if self.readers:
            try:
                self._loop.call_soon_threadsafe(self._offer, kind, line)
            except RuntimeError:
                pass  # the loop is closed

    def _offer(self, kind: str, line: bytes) -> None:
        for reader in list(self.readers):
            if _fits(reader.kind, kind):
                reader.offer(line)

    def history(self, kind: str = "") -> bytes:
        """What is remembered."""
        return b"".join(line for model, line in self._lines.copy() if _fits(kind, model))

    def follow(self, kind: str = "") -> LogFollower:
        """A reader of new lines; close it."""
        reader = LogFollower(self, kind)
        self.readers.add(reader)
        return reader


def _fits(wanted: str, model: str) -> bool:
    if not wanted:
        return True
    if wanted == "proxy":
        return not model
    return model == wanted or (wanted == "upstream" and bool(model))
