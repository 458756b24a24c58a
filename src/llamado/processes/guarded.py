"""Child processes that end with this process, even if it is killed."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from llamado.installation import python_command
from llamado.processes import reaper, watchdog

_LINE = 8192  # bytes of a log line


class Watchdog:
    """Owner of a `watchdog.py` process, which ends our children if we are killed. It is restarted if it dies.

    Children get `grace` seconds to end; `folder` is removed afterwards.
    """

    def __init__(self, grace: float, folder: Path | None = None) -> None:
        self._grace = grace
        self._folders = () if folder is None else (str(folder),)
        self.cookie = secrets.token_hex(16)
        self._lock = threading.RLock()
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the watchdog, or None."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the watchdog unless it runs. Raises OSError on systems without process groups, such as Windows."""
        if not hasattr(os, "killpg"):
            raise OSError(errno.ENOSYS, "processes that end with their parent need Linux or macOS")
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._discard()
            command = python_command("-I", "-S", watchdog.__file__, self.cookie, str(self._grace), *self._folders)
            environment = {name: value for name, value in os.environ.items() if name != watchdog.VARIABLE}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, env=environment
            )
            for group in self._groups:
                self._send(f"+{group}")

    def watch(self, group: int) -> None:
        """Add a process group."""
        with self._lock:
            self._groups.add(group)
            self._send(f"+{group}")

    def forget(self, group: int) -> None:
        """Remove a process group that ended."""
        with self._lock:
            self._groups.discard(group)
            self._send(f"-{group}")

    def end(self) -> None:
        """End the watchdog without ending any process group."""
        with self._lock:
            self._send("end")
            self._discard()

    def _send(self, line: str) -> None:
        process = self._process
        try:
            if process is not None and process.stdin is not None:
                process.stdin.write(line.encode() + b"\n")
                process.stdin.flush()
        except OSError:
            if line != "end":
                # It was killed. The new one gets all groups.
                self.start()

    def _discard(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.stdin is not None:
                process.stdin.close()
        except OSError:
            pass
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Streams(NamedTuple):
    """Standard streams of a process, as for Popen."""

    stdin: int = subprocess.DEVNULL
    stdout: int = subprocess.DEVNULL
    stderr: int = subprocess.DEVNULL


_NO_STREAMS = Streams()


class GuardedGroup:
    """A process in its own session, together with its descendants.

    `on_exit` is called once, in a thread, when all of them are gone, with the exit code as a shell reports it
    (128 + the signal's number). Subclasses handle the output.

    In its own session, descendants of a shell or container client end with it, and Ctrl-C in a terminal does not reach
    it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        guard: Watchdog,
        *,
        on_exit: Callable[[int], None],
        cwd: str | None = None,
        streams: Streams = _NO_STREAMS,
    ) -> None:
        """Start it. Raises OSError and ValueError."""
        self._guard = guard
        self._mark = secrets.token_hex(16)
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._reaped = False
        guard.start()
        self._process = subprocess.Popen(
            command,
            env=dict(environment) | {watchdog.VARIABLE: guard.cookie, watchdog.OWN_VARIABLE: self._mark},
            cwd=cwd,
            stdin=streams.stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            start_new_session=True,
        )
        guard.watch(self.pid)
        self._begin()
        threading.Thread(target=self._wait, name="llamado-wait", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id, which is also its group's."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status as in Popen: negative for a signal, None while it runs."""
        return self._process.returncode

    def _begin(self) -> None:
        """Called after the start, before the end can be noticed."""

    def _read_out(self) -> None:
        """Called after the whole group ended: read the rest of its output."""

    def _wait(self) -> None:
        process = self._process
        if hasattr(os, "waitid"):
            # Its id cannot be reused until it is reaped, so the rest of its group can be killed safely.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            self._kill_group()
            with self._lock:
                self._reaped = True
                code = process.wait()
        else:
            code = process.wait()
            with self._lock:
                self._reaped = True
        for pid in watchdog.marked(self._mark, watchdog.OWN_VARIABLE):
            # It left the group, as a daemon does.
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        self._read_out()
        self._guard.forget(process.pid)
        self._on_exit(128 - code if code < 0 else code)

    def _kill_group(self) -> None:
        self._signal_group(signal.SIGKILL)

    def signal(self, sig: int) -> None:
        """Send a signal to the process group, if it still exists."""
        self._signal_group(sig)

    def _signal_group(self, sig: int) -> None:
        with self._lock:
            if not self._reaped:
                try:
                    os.killpg(self.pid, sig)
                except (ProcessLookupError, PermissionError):
                    pass


_REAPER_SECONDS = 2.0  # for the reaper to kill its descendants before it is killed itself


class PipedProcess(GuardedGroup):
    """A command with pipes for input, output and errors. On Linux none of its descendants outlives it."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        guard: Watchdog,
        *,
        on_exit: Callable[[int], None],
        cwd: str | None = None,
        stderr: int = subprocess.PIPE,
    ) -> None:
        """Start it. Raises OSError and ValueError."""
        pipe = subprocess.PIPE
        self._has_reaper = sys.platform == "linux"
        if self._has_reaper:
            _check_program(command[0], environment, cwd)
            command = python_command("-I", "-S", reaper.__file__, *command)
        super().__init__(command, environment, guard, on_exit=on_exit, cwd=cwd, streams=Streams(pipe, pipe, stderr))

    def signal(self, sig: int) -> None:
        if sig != signal.SIGKILL or not self._has_reaper:
            super().signal(sig)
            return
        with self._lock:
            if self._reaped:
                return
            for one in (signal.SIGUSR1, signal.SIGCONT):
                os.kill(self.pid, one)
        timer = threading.Timer(_REAPER_SECONDS, self._kill_group)  # in case the command stopped or misled the reaper
        timer.daemon = True
        timer.start()

    @property
    def stdin(self) -> IO[bytes]:
        """Its standard input."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """Its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """Its standard error, if that has its own pipe."""
        assert self._process.stderr is not None
        return self._process.stderr


def _check_program(name: str, environment: Mapping[str, str], cwd: str | None) -> None:
    """Raise FileNotFoundError if the program does not exist: the reaper would report an ordinary exit code."""
    path = os.path.join(cwd or "", name) if "/" in name else name
    if shutil.which(path, path=environment.get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


class GuardedProcess(GuardedGroup):
    """A process whose output is read line by line: `on_line` is called in a thread with each line, without its end.

    `on_exit` is called after the last line.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        guard: Watchdog,
        *,
        on_line: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> None:
        """Start it. Raises OSError and ValueError."""
        self._on_line = on_line
        self.last_lines: deque[str] = deque(maxlen=20)
        streams = Streams(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        super().__init__(command, environment, guard, on_exit=on_exit, streams=streams)

    def _begin(self) -> None:
        output = self._process.stdout
        assert output is not None
        self._reader = threading.Thread(target=self._read, args=(output,), name="llamado-log", daemon=True)
        self._reader.start()

    def _read_out(self) -> None:
        self._reader.join(0.2)

    def _read(self, output: IO[bytes]) -> None:
        with output:
            while line := output.readline(_LINE):
                text = line.decode("utf-8", "replace").rstrip()
                if text:
                    self.last_lines.append(text)
                    self._on_line(text)

    def last_words(self) -> str:
        """Return the last printed line that looks like an error, or ""."""
        for line in reversed(list(self.last_lines)):
            if "error" in line.lower() or line.startswith("llamado:"):
                return line
        return ""
