"""The server's log: to stderr, and to a file where asked; plain lines or JSON."""

from __future__ import annotations

import json
import logging
import sys
import time

from llamado.errors import LlamadoError

# llama-server's verbosity thresholds: 0 output only, 1 errors, 2 warnings, 3 info, 4 and up debug.
_LEVELS = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO)


class LogFileError(LlamadoError):
    """The log file cannot be written."""


class _Lines(logging.Formatter):
    def __init__(self, *, prefix: bool, timestamps: bool, as_json: bool, verbose: bool) -> None:
        super().__init__()
        self._prefix, self._timestamps, self._json, self._verbose = prefix, timestamps, as_json, verbose

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            # A person gets the reason; the traceback is for whoever asked to see everything.
            error = record.exc_info[1]
            detail = self.formatException(record.exc_info) if self._verbose else f"{type(error).__name__}: {error}"
            message += f": {detail}"
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        if self._json:
            line = {"timestamp": stamp, "level": record.levelname.lower(), "source": record.name, "message": message}
            return json.dumps(line, ensure_ascii=False)
        start = f"{stamp} " if self._timestamps else ""
        if self._prefix or record.levelno >= logging.WARNING:
            start += f"{record.levelname.lower()}: "
        return start + message


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
    """Set up the `llamado` loggers. Raises LogFileError."""
    level = _LEVELS[max(0, verbosity)] if verbosity < len(_LEVELS) else logging.DEBUG
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file:
        try:
            handlers.append(logging.FileHandler(file, encoding="utf-8"))
        except OSError as error:
            raise LogFileError(f"--log-file {file}: {error.strerror}") from None
    root = logging.getLogger("llamado")
    root.handlers = [] if disabled else handlers
    root.propagate = False
    root.setLevel(logging.CRITICAL + 1 if disabled else level)
    for handler in handlers:
        handler.setFormatter(
            _Lines(prefix=prefix, timestamps=timestamps, as_json=as_json, verbose=level <= logging.DEBUG)
        )
