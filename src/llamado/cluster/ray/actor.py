"""Ray actor with one llamado process, which ends with the actor."""

from __future__ import annotations

import signal
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llamado.installation import own_command
from llamado.processes.guarded import GuardedProcess, Watchdog
from llamado.processes.secret_values import child_environment

_LINES = 10_000
"""Maximum number of output lines kept until they are read."""
LOST = 128 + 9  # SIGKILL
"""Exit code of a process whose actor was lost."""


class ProcessInfo(NamedTuple):
    """A started process: the number of the run, the address it listens on, and the process id on its node."""

    run: int
    host: str
    port: int
    pid: int


class ProcessActor:
    """Runs one process at a time. Thread-safe.

    `host`: the node's address, on which the process listens. `grace`: seconds between SIGTERM and SIGKILL if the actor
    ends first.
    """

    def __init__(self, grace: float, host: str | None = None) -> None:
        self._guard = Watchdog(grace)
        self._host = _node_address() if host is None else host
        self._changed = threading.Condition()
        self._run = 0
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._n_lines = 0
        self._code: int | None = None
        self._process: GuardedProcess | None = None

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> ProcessInfo:
        """Start `llamado` with these arguments and a free port of this node.

        A previous process is killed: the supervisor has lost it. Raises OSError.
        """
        self.signal(self._run, signal.SIGKILL)
        with self._changed:
            self._changed.wait_for(lambda: self._process is None or self._code is not None)
            self._run += 1
            self._lines.clear()
            self._n_lines, self._code = 0, None
            run = self._run
        port = _free_port(self._host)
        command = own_command(*arguments, "--host", self._host, "--port", str(port))
        self._process = GuardedProcess(
            command,
            {**child_environment(), **environment},
            self._guard,
            on_line=self._add_line,
            on_exit=self._set_exit_code,
        )
        return ProcessInfo(run, self._host, port, self._process.pid)

    def read_output(self, run: int, seen: int, wait: float) -> tuple[list[str], int | None]:
        """Return a run's output after the first `seen` lines, and its exit code if it has ended.

        Waits up to `wait` seconds for new lines or the end. Returns `LOST` as exit code if another run has started.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: run != self._run or self._code is not None or self._n_lines > seen, timeout=wait
            )
            if run != self._run:
                return [], LOST
            new = min(self._n_lines - seen, len(self._lines))
            return list(self._lines)[len(self._lines) - new :], self._code

    def signal(self, run: int, sig: int) -> None:
        """Send a signal to a run's process group; ignored if another run has started."""
        if run == self._run and self._process is not None:
            self._process.signal(sig)

    def _add_line(self, line: str) -> None:
        with self._changed:
            self._lines.append(line)
            self._n_lines += 1
            self._changed.notify_all()

    def _set_exit_code(self, code: int) -> None:
        with self._changed:
            self._code = code
            self._changed.notify_all()


def _node_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.bind((host, 0))
        port: int = found.getsockname()[1]
        return port
