"""Commands run by tools: limited in time and output, and leaving no processes behind."""

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

_PIECE = 64 * 1024  # bytes per read
_AFTER_LIMIT = 0.005  # seconds between two reads of excess output, so that a flood does not occupy a CPU
_POLL = 0.05  # seconds between two checks of the deadline
_CUT = "\n[output truncated]"


@dataclass(frozen=True)
class CommandResult:
    """Result of a command. `code` is 1 if a signal ended it, as in llama-server."""

    output: bytes
    code: int
    cut: bool = False
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """True if it exited with code 0 in time."""
        return self.code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """The output as text, with a note if it was truncated."""
        return self.output.decode("utf-8", "replace") + (_CUT if self.cut else "")


class CommandRunner:
    """Runs commands, and stops all of them when the server ends, even if it is killed."""

    def __init__(self) -> None:
        self.guard = Watchdog(grace=1.0)
        self._running: set[PipedProcess] = set()
        self._closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Kill all running commands."""
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
        on_output: Callable[[str], None] | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        input_bytes: bytes = b"",
        merge_stderr: bool = True,
    ) -> CommandResult:
        """Run a command and wait for its end; then kill what it left running.

        `limit`: bytes of output to keep. `on_output`: called with output as it arrives. `is_stopped`: returns True to
        stop the command. `input_bytes`: its standard input. `merge_stderr`: include standard error in the output.
        """
        ended = threading.Event()
        errors = subprocess.STDOUT if merge_stderr else subprocess.DEVNULL
        with self._lock:
            if self._closed:
                return CommandResult(b"the server is ending", -1)
            try:
                process = PipedProcess(
                    command,
                    child_environment(),
                    self.guard,
                    on_exit=lambda _: ended.set(),
                    cwd=cwd,
                    stderr=errors,
                )
            except (OSError, ValueError):
                return CommandResult(b"failed to spawn process", -1)
            self._running.add(process)
        try:
            deadline = time.monotonic() + seconds
            writer = threading.Thread(target=_feed, args=(process, input_bytes), name="llamado-tool-input", daemon=True)
            writer.start()
            output, cut, timed_out = _read(process, ended, limit, deadline, on_output, is_stopped)
        finally:
            process.signal(signal.SIGKILL)
            ended.wait(5.0)
            writer.join(1.0)
            process.stdout.close()
            with self._lock:
                self._running.discard(process)
        code = process.returncode
        return CommandResult(output, code if code is not None and code >= 0 else 1, cut, timed_out)


def _feed(process: PipedProcess, input_bytes: bytes) -> None:
    try:
        if input_bytes:
            process.stdin.write(input_bytes)
        process.stdin.close()
    except OSError:
        pass  # it closed its standard input


def _read(
    process: PipedProcess,
    ended: threading.Event,
    limit: int,
    deadline: float,
    on_output: Callable[[str], None] | None,
    is_stopped: Callable[[], bool],
) -> tuple[bytes, bool, bool]:
    """Return the output up to the limit, True if there was more, and True if the deadline passed."""
    fd = process.stdout.fileno()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    kept, cut = bytearray(), False
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while True:
        if is_stopped():
            break
        if time.monotonic() >= deadline and not ended.is_set():
            return bytes(kept), cut, True
        if not poller.poll(_POLL * 1000):
            if ended.is_set():
                break  # a detached process holds the pipe
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
            if on_output is not None and (text := decoder.decode(piece[:room])):
                on_output(text)
    # The command closed its output but may still run.
    while not ended.wait(_POLL) and not is_stopped():
        if time.monotonic() >= deadline:
            return bytes(kept), cut, True
    return bytes(kept), cut, False
