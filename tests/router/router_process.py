"""A router in front of fake models, for tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from ports import free_ports

from llamado.router.serve import RouterServer

FAKE = str(Path(__file__).parent / "fake_model.py")


def alive(pid: int) -> bool:
    """Return True if a process runs (a zombie does not)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


@dataclass
class Running:
    """A running router and its client."""

    url: str
    http: httpx.Client
    log: Path

    def ask(self, model: str, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": model, **body})

    def status(self, model: str) -> dict[str, Any]:
        return next(m["status"] for m in self.http.get("/models").json()["data"] if m["id"] == model)

    def running(self) -> dict[str, dict[str, Any]]:
        return {entry["model"]: entry for entry in self.http.get("/running").json()["running"]}


@dataclass
class RouterHere(Running):
    """A router in a thread of this process."""

    server: RouterServer


@dataclass
class RouterProcess(Running):
    """A router in its own process."""

    process: subprocess.Popen[bytes]


Start = Callable[..., Any]


def fake(name: str, *options: str, **more: Any) -> dict[str, Any]:
    """Return a fake model's entry for a config.yaml."""
    words = [sys.executable, "-S", FAKE, name, "${PORT}", *options]
    return {"cmd": " ".join(words), "proxy": "http://127.0.0.1:${PORT}", **more}


def config(models: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a config.yaml of models on free ports; without `groups` all may run side by side."""
    together = {"all": {"swap": False, "exclusive": False, "members": list(models)}}
    return {"startPort": free_ports(max(len(models), 1)), "groups": together, "models": models, **more}
