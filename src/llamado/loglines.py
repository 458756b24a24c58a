"""Records of the log as lines of text that nobody else can forge."""

from __future__ import annotations

import logging
import time


class LineFormatter(logging.Formatter):
    """What a record says, in one line: names that strangers chose can neither begin another nor colour a terminal.

    `verbose`: with the traceback of an error, which is for whoever asked to see everything; its lines are indented.
    `timed`: with the time in front.
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
    """When it was, as the clock on the wall showed it: 2026-01-31 09:05:00.042."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"


def escaped(text: str) -> str:
    """Text of one line, without control characters."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
