"""Logging to stderr and to a file, as plain lines or JSON, from a background thread: logging never blocks on the disk.

LogFormatter logged while a request is served carry its id (`X-Request-Id`), taken from the current task.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from typing import TextIO

from llamado.errors import LlamadoError
from llamado.http.monitoring.request_log import current
from llamado.loglines import LineFormatter, escaped, stamp

# llama-server's verbosity thresholds: 0 output only, 1 errors, 2 warnings, 3 info, 4 and up debug.
_LEVELS = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO)

EVERYTHING = 5
"""Log level of details shown from verbosity 10 on, such as the device of each layer."""

# LogFormatter queued for a slow disk or an unread pipe. Beyond, lines are dropped rather than requests delayed.
_MOST_WAITING = 10_000
_FLUSH_SECONDS = 1.0

_COLORS = {logging.DEBUG: "2", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}


class LogFileError(LlamadoError):
    """The log file cannot be written."""


class LogFormatter(LineFormatter):
    """Formats a record as a line of text, or as JSON with the fields `timestamp`, `level`, `source`, `message`,
    `request_id` and the record's own `fields`."""

    def __init__(self, *, prefix: bool, timestamps: bool, as_json: bool, verbose: bool, colors: bool = False) -> None:
        super().__init__(verbose=verbose)
        self._prefix, self._timestamps, self._json = prefix, timestamps, as_json
        self._colors = colors

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        request = current.get()
        if self._json:
            utc = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
            line = {"timestamp": utc, "level": record.levelname.lower(), "source": record.name, "message": message}
            if request is not None:
                line["request_id"] = request.id
            fields = getattr(record, "fields", {})
            line |= {name: escaped(value) if isinstance(value, str) else value for name, value in fields.items()}
            return json.dumps(line, ensure_ascii=False)
        start = f"{stamp(record)} " if self._timestamps else ""
        if self._prefix or record.levelno >= logging.WARNING:
            start += f"{record.levelname.lower()}: "
        if request is not None:
            start += f"[{request.id}] "
        color = _COLORS.get(record.levelno) if self._colors else None
        return f"\x1b[{color}m{start}{message}\x1b[0m" if color else start + message


class BackgroundHandler(logging.Handler):
    """Writes lines in a background thread. Formats them in the calling task, whose context holds the request."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        # Signal handlers log, too, and may interrupt `emit`: SimpleQueue is the only reentrant queue.
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._n_dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= _MOST_WAITING:
            self._n_dropped += 1
            return
        try:
            self._lines.put(self.format(record))
        except Exception:
            self.handleError(record)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="llamado-log", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        while True:
            lines = [self._lines.get()]
            try:
                while len(lines) < 1000:
                    lines.append(self._lines.get_nowait())
            except queue.Empty:
                pass
            text = [line for line in lines if isinstance(line, str)]
            if self._n_dropped:
                text.append(f"warning: {self._n_dropped} line(s) dropped: the log is not read fast enough")
                self._n_dropped = 0
            try:
                if text:
                    self._stream.write("\n".join(text) + "\n")
                    self._stream.flush()
            except (OSError, ValueError):
                pass  # a closed pipe or a full disk must not end the server
            for line in lines:
                if isinstance(line, threading.Event):
                    line.set()

    def flush(self) -> None:
        if self._thread is not None:
            written = threading.Event()
            self._lines.put(written)
            written.wait(_FLUSH_SECONDS)

    def close(self) -> None:
        self.flush()
        super().close()


def configure(
    *,
    verbosity: int = 3,
    file: str | None = None,
    as_json: bool = False,
    prefix: bool = False,
    timestamps: bool = False,
    disabled: bool = False,
    colors: str = "auto",
) -> None:
    """Set up the loggers of this program and of its HTTP server. Raises LogFileError."""
    level = _LEVELS[max(0, verbosity)] if verbosity < len(_LEVELS) else logging.DEBUG
    if verbosity >= 10:
        level = EVERYTHING
    outputs: list[tuple[TextIO, int]] = [(sys.stderr, level)]
    if file:
        try:
            # A log file gets at least INFO: low verbosity is meant for the terminal.
            outputs.append((open(file, "a", encoding="utf-8"), min(level, logging.INFO)))  # noqa: SIM115
        except OSError as error:
            raise LogFileError(f"--log-file {file}: {error.strerror}") from None
    handlers: list[logging.Handler] = []
    for stream, least in [] if disabled else outputs:
        handler = BackgroundHandler(stream)
        handler.setLevel(least)
        colored = colors == "on" or (colors == "auto" and stream.isatty())
        handler.setFormatter(
            LogFormatter(
                prefix=prefix,
                timestamps=timestamps,
                as_json=as_json,
                verbose=level <= logging.DEBUG,
                colors=colored and stream is sys.stderr and not as_json,
            )
        )
        handlers.append(handler)
    level = min(least for _, least in outputs)
    for name, least in (("llamado", level), ("uvicorn", max(level, logging.ERROR)), ("asyncio", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers = list(handlers)
        logger.propagate = False
        logger.setLevel(logging.CRITICAL + 1 if disabled else least)
