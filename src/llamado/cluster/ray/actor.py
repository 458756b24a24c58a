"""What runs on a node of Ray's: an actor with one process of llamado's, which does not outlive it."""

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
"""Lines of output that are kept until somebody asks for them."""
GONE = 128 + 9  # SIGKILL
"""Exit code of a process that went with its actor."""


class Begun(NamedTuple):
    """A process that was started: its number, where it listens, and its id on that node."""

    run: int
    host: str
    port: int
    pid: int


class ProcessActor:
    """One process at a time. `host`: the node's address, on which it listens; `grace`: seconds between SIGTERM and
    SIGKILL where this actor is ended first.

    Methods are called in several threads at once.
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

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Begun:
        """Start `llamado` with arguments, and with an address: a free port of this node.

        A process from before is ended: who started it has lost it. Raises OSError.
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
            command, {**child_environment(), **environment}, self._guard, said=self._said, ended=self._ended
        )
        return Begun(run, self._host, port, self._process.pid)

    def follow(self, run: int, seen: int, wait: float) -> tuple[list[str], int | None]:
        """What a process has said after the first `seen` lines, and its exit code once it has ended; what is new is
        waited for, for so many seconds.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: run != self._run or self._code is not None or self._n_lines > seen, timeout=wait
            )
            if run != self._run:
                return [], GONE
            new = min(self._n_lines - seen, len(self._lines))
            return list(self._lines)[len(self._lines) - new :], self._code

    def signal(self, run: int, sig: int) -> None:
        """Send a signal to a process, and to all that it started."""
        if run == self._run and self._process is not None:
            self._process.signal(sig)

    def _said(self, line: str) -> None:
        with self._changed:
            self._lines.append(line)
            self._n_lines += 1
            self._changed.notify_all()

    def _ended(self, code: int) -> None:
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
