"""Workers in processes of their own, ours and the real ones, which tell how many graphs they computed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from ports import free_port
from waiting import GUARD

START_SECONDS = 120.0
STOP_SECONDS = 20.0


@dataclass
class WorkerProcess:
    """A worker with one thread; GGML_RPC_DEBUG makes it write a line for each command to `log`."""

    endpoint: str
    log: Path
    ours: bool

    def graphs(self) -> int:
        """Graphs computed so far."""
        said = self.log.read_text(errors="replace")
        return len(re.findall(r" GRAPH_(?:RE)?COMPUTE " if self.ours else r"\[graph_(?:re)?compute\] device", said))


@contextmanager
def our_worker(log: Path) -> Iterator[WorkerProcess]:
    """`llamado worker` on a port it chooses."""
    with running([sys.executable, "-m", "llamado", "worker", "--protocol", "7", "-p", "0", "-t", "1"], log) as process:
        wait_until(lambda: "device 0" in log.read_text(), process, log)
        found = re.search(r"llamado worker on (\S+)", log.read_text())
        assert found is not None
        yield WorkerProcess(found[1], log, True)


@contextmanager
def real_worker(programs: Path, log: Path) -> Iterator[WorkerProcess]:
    """ggml-rpc-server on a free port."""
    port = free_port()
    with running([str(programs / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1"], log) as process:
        wait_until(lambda: listens(port), process, log)  # what it says when it is ready stays in its buffer
        yield WorkerProcess(f"127.0.0.1:{port}", log, False)


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to `log`, ended afterwards."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"GGML_RPC_DEBUG": "1"})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Until a process that starts is ready; fails with what it said where it ends instead, or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        ended = process.poll() is not None
        assert not ended and time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
        time.sleep(0.02)


def listens(port: int) -> bool:
    """Return True if the endpoint accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=GUARD).close()
    except OSError:
        return False
    return True


def healthy(client: httpx.Client) -> bool:
    """Return True if a server has loaded its model."""
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
