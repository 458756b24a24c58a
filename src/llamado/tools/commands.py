"""Commands that tools run: with an end in time, output up to a limit, and nothing left behind."""

from __future__ import annotations

import codecs
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamado.processes.guarded import PipedProcess, Watchdog
from llamado.processes.secret_values import child_environment

_PIECE = 64 * 1024  # bytes of one reading
_AFTER_LIMIT = 0.005  # seconds between two readings of what nobody wants: a flood does not take the processor
_POLL = 0.05  # seconds between two looks at the clock
_CUT = "\n[output truncated]"


@dataclass(frozen=True)
class Ran:
    """What became of a command. `code` is 1 for one that a signal ended, as in llama-server."""

    output: bytes
    code: int
    cut: bool = False
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Whether it came to a good end."""
        return self.code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """The output, and whether there was more."""
        return self.output.decode("utf-8", "replace") + (_CUT if self.cut else "")


class Commands:
    """Runs commands; at the server's end, however it comes, all of them end."""

    def __init__(self) -> None:
        self.guard = Watchdog(grace=1.0)
        self._running: set[PipedProcess] = set()
        self._closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """End all that runs."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            process.signal(signal.SIGKILL)
        self.guard.end()

    def run(
        self,
        command: Sequence[str],
        *,
        limit: int,
        seconds: float,
        cwd: str | None = None,
        said: Callable[[str], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
        given: bytes = b"",
        merged: bool = True,
    ) -> Ran:
        """Run a command and wait for its end; what it left running ends with it.

        `limit`: bytes of output that are kept. `said`: takes the output while it comes. `stopped`: whether nobody waits
        any more. `given`: what it reads. `merged`: its errors are part of the output.
        """
        ended = threading.Event()
        errors = subprocess.STDOUT if merged else subprocess.DEVNULL
        with self._lock:
            if self._closed:
                return Ran(b"the server is ending", -1)
            try:
                process = PipedProcess(
                    command,
                    child_environment(),
                    self.guard,
                    ended=lambda _: ended.set(),
                    cwd=cwd,
                    stderr=errors,
                )
            except (OSError, ValueError):
                return Ran(b"failed to spawn process", -1)
            self._running.add(process)
        try:
            deadline = time.monotonic() + seconds
            writer = threading.Thread(target=_feed, args=(process, given), name="llamado-tool-input", daemon=True)
            writer.start()
            output, cut, timed_out = _read(process, ended, limit, deadline, said, stopped)
        finally:
            process.signal(signal.SIGKILL)
            ended.wait(5.0)
            writer.join(1.0)
            process.stdout.close()
            with self._lock:
                self._running.discard(process)
        code = process.returncode
        return Ran(output, code if code is not None and code >= 0 else 1, cut, timed_out)


def _feed(process: PipedProcess, given: bytes) -> None:
    try:
        if given:
            process.stdin.write(given)
        process.stdin.close()
    except OSError:
        pass  # it does not read all of it


def _read(
    process: PipedProcess,
    ended: threading.Event,
    limit: int,
    deadline: float,
    said: Callable[[str], None] | None,
    stopped: Callable[[], bool],
) -> tuple[bytes, bool, bool]:
    """Output up to the limit, whether there was more, and whether the time was over."""
    fd = process.stdout.fileno()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    kept, cut = bytearray(), False
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while True:
        if stopped():
            break
        if time.monotonic() >= deadline and not ended.is_set():
            return bytes(kept), cut, True
        if not poller.poll(_POLL * 1000):
            if ended.is_set():
                break  # somebody holds the pipe who is none of ours
            continue
        piece = os.read(fd, _PIECE)
        if not piece:
            break
        room = limit - len(kept)
        if len(piece) > room:
            cut = True
            time.sleep(_AFTER_LIMIT)
        if room > 0:
            kept += piece[:room]
            if said is not None and (text := decoder.decode(piece[:room])):
                said(text)
    # Its output has ended; it may still run.
    while not ended.wait(_POLL) and not stopped():
        if time.monotonic() >= deadline:
            return bytes(kept), cut, True
    return bytes(kept), cut, False
