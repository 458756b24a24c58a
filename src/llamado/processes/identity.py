"""Process identity: a process id with its start time, because the system reuses ids."""

from __future__ import annotations

import subprocess
from pathlib import Path


def start_mark(pid: int) -> str:
    """Return the start time of a process in the system's own format, or "" if it has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
        done = subprocess.run(["ps", "-p", str(pid), "-o", "lstart="], capture_output=True, text=True, check=False)
        return done.stdout.strip()
    # Fields 3 and 22 of proc(5): a zombie has ended; the start is in clock ticks since boot.
    return "" if after_name[0] == "Z" else after_name[19]


def is_same(pid: int, mark: str) -> bool:
    """Return True if the process that started at `mark` still runs."""
    return bool(mark) and pid > 0 and start_mark(pid) == mark
