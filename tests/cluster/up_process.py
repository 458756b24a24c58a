"""`llamado up` as a process, for tests that kill it or its services."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import orjson
from waiting import GUARD, until

from llamado.cluster.state import all_clusters
from llamado.commands import cli
from llamado.processes.watchdog import marked

BODY = {"prompt": "Once upon a time", "n_predict": 24, "temperature": 0, "ignore_eos": True, "seed": 1}


class Up:
    """`llamado up` and related commands, with their state in a temporary folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        (folder / "run").mkdir()
        self.environment = os.environ | {"XDG_RUNTIME_DIR": str(folder / "run"), "UP_TEST": str(folder)}
        self.processes: list[subprocess.Popen[bytes]] = []

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llamado", *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=GUARD)

    def printed(self, *arguments: str) -> str:
        """Return what a command prints in this process, which has imported it already."""
        with mock.patch.dict(os.environ, self.environment), contextlib.redirect_stdout(io.StringIO()) as out:
            cli.main([*arguments])
        return out.getvalue()

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "llamado", "up", "-m", str(self.model), "--port", "0", *arguments]
        with (self.folder / "out").open("wb") as out:
            process = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out, start_new_session=True)
        self.processes.append(process)
        return process

    def state(self) -> dict[str, Any]:
        """Return the cluster as in `llamado ps --json`, {} if there is none. Starts no process."""
        with mock.patch.dict(os.environ, self.environment):
            clusters = all_clusters()
        found: dict[str, Any] = orjson.loads(orjson.dumps(asdict(clusters[0]))) if clusters else {}
        return found

    def ready(self) -> dict[str, Any]:
        def is_ready() -> dict[str, Any] | None:
            assert self.processes[-1].poll() is None, (self.folder / "out").read_text()
            state = self.state()
            return state if state.get("phase") == "ready" else None

        found: dict[str, Any] = until(is_ready)
        return found

    def left(self) -> set[int]:
        """Return the running processes that were started here, directly or indirectly."""
        return marked(str(self.folder), "UP_TEST")


def answer(url: str) -> bytes:
    """Return the generated text. Retries while the server cannot be reached or is not ready."""

    def request() -> bytes | None:
        try:
            response = httpx.post(f"{url}/completion", json=BODY, timeout=GUARD)
        except httpx.TransportError:
            return None
        found: bytes | None = response.json()["content"].encode() if response.status_code == 200 else None
        return found

    found: bytes = until(request)
    return found
