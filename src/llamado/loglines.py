"""Log formatting: one line per record, which untrusted text cannot forge."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

LINES_A_MINUTE = 20
"""Maximum log lines of one kind per minute that clients can cause."""


class LineFormatter(logging.Formatter):
    """Format a record as one line without control characters.

    `verbose`: append the traceback of an error, indented. `timed`: prepend the time.
    """

    def __init__(self, *, verbose: bool = False, timed: bool = False) -> None:
        super().__init__()
        self._verbose, self._timed = verbose, timed

    def format(self, record: logging.LogRecord) -> str:
        message = (f"{stamp(record)} " if self._timed else "") + escaped(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            message += f": {escaped(f'{type(error).__name__}: {error}')}"
            if self._verbose:
                lines = self.formatException(record.exc_info).splitlines()
                message = "\n    ".join([message, *map(escaped, lines)])
        return message


@dataclass
class _Minute:
    """Lines of one kind since `began` (time.monotonic()): written and left out."""

    began: float
    written: int = 0
    left_out: int = 0


class LineLimit(logging.Filter):
    """Rate limit for a logger whose lines clients can cause: at most `lines_a_minute` lines of each kind.

    The kind of a line is its message before formatting. The lines left out are counted.
    """

    def __init__(self, lines_a_minute: int = LINES_A_MINUTE) -> None:
        super().__init__()
        self._most = lines_a_minute
        self._kinds: dict[str, _Minute] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be written, and append the number of lines of its kind left out before it."""
        now = time.monotonic()
        with self._lock:
            minute = self._kinds.get(record.msg)
            left_out = 0
            if minute is None or now - minute.began >= 60:
                left_out = 0 if minute is None else minute.left_out
                minute = self._kinds[record.msg] = _Minute(now)
            if minute.written >= self._most:
                minute.left_out += 1
                return False
            minute.written += 1
        if left_out:
            record.msg += f" ({left_out} lines like this one were left out)"
        return True

    def overdue(self) -> dict[str, int]:
        """Return and reset the number of lines left out, by kind, in minutes that are over."""
        now = time.monotonic()
        with self._lock:
            over = {kind: m.left_out for kind, m in self._kinds.items() if m.left_out and now - m.began >= 60}
            for kind in over:
                del self._kinds[kind]
        return over


def stamp(record: logging.LogRecord) -> str:
    """Return the local time of a record: 2026-01-31 09:05:00.042."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"


def escaped(text: str) -> str:
    """Return the text with control characters and line feeds escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
