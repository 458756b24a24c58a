"""Worker processes for servers of a split model."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from waiting import GUARD


class WorkerProcess:
    """`llamado worker` with one thread; it keeps its port when it is restarted."""

    def __init__(self, folder: Path, name: str) -> None:
        self._log = folder / f"{name}.log"
        self.port = 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "llamado", "worker", "-p", str(self.port), "-t", "1"]
        with self._log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        deadline = time.monotonic() + 60
        while (found := re.search(r"127\.0\.0\.1:(\d+)", self._log.read_text(errors="replace"))) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text(errors="replace")
            time.sleep(0.02)
        self.port = int(found[1])

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Kill it without notice, like a power failure."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(GUARD)
