"""Log formatting: one line per record, which untrusted text cannot forge."""

from __future__ import annotations

import logging
import time


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


def stamp(record: logging.LogRecord) -> str:
    """Return the local time of a record: 2026-01-31 09:05:00.042."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"


def escaped(text: str) -> str:
    """Return the text with control characters and line feeds escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
