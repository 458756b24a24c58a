"""Fixtures of the server's tests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def fake_server(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Starts `fake_server.py`; returns the process and its address once the port is open."""
    processes: list[subprocess.Popen[str]] = []

    def start(*options: str) -> tuple[subprocess.Popen[str], str]:
        port_file = tmp_path / f"port{len(processes)}"
        command = [sys.executable, str(HERE / "fake_server.py"), str(port_file), *options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        for _ in range(6000):
            if port_file.exists() and (text := port_file.read_text()):
                return process, f"http://127.0.0.1:{text}"
            time.sleep(0.01)
        raise AssertionError("the server did not open its port")

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
