"""The tail of the log, for `/logs` and the page, and a stream of new lines, for `/logs/stream`."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from itertools import islice
from typing import Any, NamedTuple

from llamado.http.monitoring.request_log import current
from llamado.loglines import LineFormatter

MODELS = "llamado.model"
"""Parent of the loggers with the output of models' processes, one for each model."""
_KEPT = 256 * 1024  # bytes of history
_BEHIND = 1024  # lines that wait for a slow reader before new ones are dropped


class LogLine(NamedTuple):
    """One line of the log."""

    model: str
    """The model whose process printed the line; "": this process."""
    at: float
    """Seconds since 1970."""
    level: str
    request: str
    """The request's id; "" for a line outside of requests."""
    data: bytes
    """The text with its newline."""

    def as_json(self) -> dict[str, Any]:
        """Return the line as JSON for the page."""
        text = self.data[:-1].decode("utf-8", "replace")
        found: dict[str, Any] = {"at": round(self.at, 3), "level": self.level, "text": text}
        if self.model:
            found["model"] = self.model
        if self.request:
            found["request"] = self.request
        return found


class LogFollower:
    """A reader of new lines. `kind`: "" (all), "proxy" (this process), "upstream" (all models), or a model's name."""

    def __init__(self, tail: LogTail, kind: str) -> None:
        self._tail = tail
        self.kind = kind
        self._lines: asyncio.Queue[bytes] = asyncio.Queue(_BEHIND)

    def offer(self, line: bytes) -> None:
        """Queue a line, or drop it if the reader is too far behind; event loop only."""
        if not self._lines.full():
            self._lines.put_nowait(line)

    async def read(self) -> bytes:
        """Wait for new lines and return them all."""
        lines = [await self._lines.get()]
        while not self._lines.empty():
            lines.append(self._lines.get_nowait())
        return b"".join(lines)

    def close(self) -> None:
        """Stop following."""
        self._tail.readers.discard(self)


class LogTail(logging.Handler):
    """A log handler that keeps the last 256 kB of lines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._loop: asyncio.AbstractEventLoop | None = None  # the readers' loop
        self._lines: deque[LogLine] = deque()
        self._size = 0
        self._n = 0  # lines logged so far
        self.readers: set[LogFollower] = set()
        self.setFormatter(LineFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line; any thread."""
        data = self.format(record).encode("utf-8", "replace") + b"\n"
        # An attribute, not a part of the logger's name: names of models may have dots.
        kind = getattr(record, "model", "")
        request = current.get()
        level = record.levelname.lower()
        self._lines.append(LogLine(kind, record.created, level, "" if request is None else request.id, data))
        self._n += 1
        self._size += len(data)
        while self._size > _KEPT and self._lines:
            self._size -= len(self._lines.popleft().data)
        if self.readers and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._offer, kind, data)
            except RuntimeError:
                pass  # the loop is closed

    def _offer(self, kind: str, line: bytes) -> None:
        for reader in list(self.readers):
            if _fits(reader.kind, kind):
                reader.offer(line)

    def since(self, n: int) -> tuple[int, list[LogLine]]:
        """Return the number of lines logged so far, and the kept lines after the first `n`."""
        self.acquire()
        try:
            new = min(self._n - n, len(self._lines))
            return self._n, [*islice(self._lines, len(self._lines) - new, None)]
        finally:
            self.release()

    def history(self, kind: str = "") -> bytes:
        """Return the kept lines of a kind (see LogFollower)."""
        return b"".join(line.data for line in self._lines.copy() if _fits(kind, line.model))

    def follow(self, kind: str = "") -> LogFollower:
        """Return a reader of new lines, which the caller closes; event loop only."""
        self._loop = asyncio.get_running_loop()
        reader = LogFollower(self, kind)
        self.readers.add(reader)
        return reader


def _fits(wanted: str, model: str) -> bool:
    if not wanted:
        return True
    if wanted == "proxy":
        return not model
    return model == wanted or (wanted == "upstream" and bool(model))
