"""Reaper process: runs a command and kills every descendant that outlives it (Linux).

`python reaper.py COMMAND [ARGUMENT …]`. As a "child subreaper" (prctl(2)) it becomes the parent of every process below
it that loses its own, whatever session or environment that has. When the command has ended, they are killed, and this
process ends as the command did. SIGUSR1 ends all of it at once, SIGTERM after `GRACE` seconds: the command is in the
same process group and gets SIGTERM itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

GRACE = 0.5
_PR_SET_CHILD_SUBREAPER = 36


def kill_children() -> bool:
    """Kill all children; False if none can be killed."""
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children", "rb") as file:
            children = [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without that file
        children = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent(pid) == own]
    killed = False
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
            killed = True
        except (ProcessLookupError, PermissionError):
            pass
    return killed


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def main() -> int:
    """Run the command; returns the exit code, or ends by the signal that ended the command."""
    command = sys.argv[1:]
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGINT, signal.SIGHUP)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ending = False

    def end(*_: object) -> None:
        nonlocal ending
        ending = True
        kill_children()

    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    process = os.fork()
    if process == 0:
        for sig in (*signals, signal.SIGPIPE, signal.SIGXFSZ):  # the last two are ignored by Python
            signal.signal(sig, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        try:
            os.execvp(command[0], command)
        except OSError:
            os._exit(127)
    signal.signal(signal.SIGUSR1, end)
    signal.signal(signal.SIGALRM, end)
    signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, GRACE))
    for sig in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # the command's pipes end with the command
        os.dup2(nothing, fd)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    status = 0
    while True:
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if pid == process:
            status, ending = ended, True
        if ending and not kill_children():
            break  # none is left, or they belong to other users
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
