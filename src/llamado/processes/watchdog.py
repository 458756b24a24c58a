"""Watchdog process: ends the children of its parent when the parent is killed.

`python watchdog.py COOKIE GRACE [FOLDER]`: the parent writes lines `+GROUP` and `-GROUP` for process groups that start
and end. If standard input closes without a line `end`, the parent was killed. Every group, and on Linux every process
with `LLAMADO_PROCESSES=COOKIE` in its environment (one that left its group), then gets SIGTERM, and SIGKILL after GRACE
seconds, and FOLDER, which holds their sockets, is removed. The few imports keep it at milliseconds and megabytes.
"""

from __future__ import annotations

import os
import signal
import sys
import time

VARIABLE = "LLAMADO_PROCESSES"
OWN_VARIABLE = "LLAMADO_PROCESS"
"""The same for one process and its descendants."""


def marked(cookie: str, variable: str = VARIABLE) -> set[int]:
    """Return the ids of processes with the cookie in their environment; empty without /proc."""
    found: set[int] = set()
    wanted = f"{variable}={cookie}".encode()
    try:
        names = os.listdir("/proc")
    except OSError:
        return found
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        found.add(int(name))
            except OSError:
                continue  # another user's, or gone
    return found


def send(groups: set[int], cookie: str, sig: int) -> bool:
    """Signal all remaining processes; return False if there are none."""
    left = False
    for group in groups:
        try:
            os.killpg(group, sig)
            left = True
        except (ProcessLookupError, PermissionError):
            pass
    for pid in marked(cookie):
        try:
            os.kill(pid, sig)
            left = True
        except (ProcessLookupError, PermissionError):
            pass
    return left


def main() -> int:
    """Wait until the parent ends; return the exit code."""
    cookie, grace, folders = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    # Ctrl-C in a terminal is for the parent, which ends its processes in order.
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "end":
            return 0
        if word[:1] == "+":
            groups.add(int(word[1:]))
        elif word[:1] == "-":
            groups.discard(int(word[1:]))
    left = send(groups, cookie, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = send(groups, cookie, 0)
    if left:
        send(groups, cookie, signal.SIGKILL)
    for folder in folders:
        try:
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)
        except OSError:
            pass  # already removed
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
