"""llama.cpp's ggml-rpc-server, running for a test."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ports import free_port

from llamado.rpc.client.device import RemoteDevice, connect
from llamado.rpc.transport import ConnectError


@contextmanager
def peer_worker(
    programs: Path, *options: str, cache: Path | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield endpoint and process of a server with one CPU thread on a free loopback port."""
    port = free_port()
    command = [str(programs / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1", *options]
    environment = os.environ | ({"LLAMA_CACHE": str(cache)} if cache else {})
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def connect_soon(endpoint: str, **options: Any) -> RemoteDevice:
    """Return the first device of a worker that may still be starting."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return connect(endpoint, **options)[0]
        except ConnectError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
