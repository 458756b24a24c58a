"""Fixtures of the router's tests."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from router_process import RouterHere, RouterProcess, Start, alive
from waiting import GUARD, until

from llamado.commands.cli import make_parser
from llamado.commands.serve import serve_settings
from llamado.devices.kernel_cache import cache_folder
from llamado.flags import parse
from llamado.http.sockets import listen
from llamado.router import child, serve, swap_config


def _flags(tmp_path: Path, number: int, config: dict[str, Any] | None, flags: tuple[str, ...]) -> list[str]:
    if config is None:
        return list(flags)
    path = tmp_path / f"config{number}.yaml"
    path.write_text(yaml.safe_dump(config))
    return ["--config", str(path), *flags]


def share_kernels(cache: Path) -> None:
    """Give an empty cache folder the kernels of this test run, which take seconds to compile."""
    kernels = cache_folder()
    kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache.mkdir()
    (cache / "kernels").symlink_to(kernels)


def _pids(client: httpx.Client) -> set[int]:
    with contextlib.suppress(httpx.HTTPError, KeyError):
        return {entry["pid"] for entry in client.get("/running").json()["running"]}
    return set()


@pytest.fixture
def start_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Run routers in threads, with a config.yaml (a mapping) or flags; at the end check that no process is left."""
    share_kernels(tmp_path / "cache")
    monkeypatch.setenv("LLAMADO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(swap_config, "_STOP_TIMEOUT", 0.5)
    monkeypatch.setattr(child, "PORT_WAIT", 0.3)
    monkeypatch.setattr(serve, "FleetLimits", functools.partial(serve.FleetLimits, backoff=0.1))
    logger = logging.getLogger("llamado")
    level = logger.level
    logger.setLevel(logging.INFO)
    started: list[tuple[RouterHere, threading.Thread, logging.Handler]] = []

    def start(config: dict[str, Any] | None = None, *flags: str) -> RouterHere:
        log = tmp_path / f"router{len(started)}.log"
        handler = logging.FileHandler(log)
        logger.addHandler(handler)
        given = ["--port", "0", *_flags(tmp_path, len(started), config, flags)]
        parsed, _ = parse(make_parser("serve"), "serve", given)
        sockets = listen(("127.0.0.1",), 0)
        server = serve.make_server(serve_settings(parsed), parsed)
        thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
        thread.start()
        until(lambda: server.started)  # from here on `server.router` is set
        url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        here = RouterHere(url, httpx.Client(base_url=url, timeout=GUARD), log, server)
        started.append((here, thread, handler))
        return here

    yield start
    for here, thread, handler in started:
        left = _pids(here.http)
        here.http.close()
        here.server.should_exit = True
        thread.join(GUARD)
        assert not thread.is_alive()
        logger.removeHandler(handler)
        handler.close()
        assert not any(pid and alive(pid) for pid in left)
    logger.setLevel(level)


@pytest.fixture
def router_process(tmp_path: Path) -> Iterator[Start]:
    """Start `llamado serve` as a process, for tests that kill it."""
    routers: list[RouterProcess] = []

    def start(config: dict[str, Any] | None = None, *flags: str) -> RouterProcess:
        log = tmp_path / f"process{len(routers)}.log"
        given = ["--port", "0", *_flags(tmp_path, len(routers), config, flags)]
        command = [sys.executable, "-m", "llamado", "serve", *given]
        environment = {**os.environ, "LLAMADO_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf")}
        environment["TMPDIR"] = str(tmp_path)
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

        def url() -> str:
            assert process.poll() is None, log.read_text()
            lines = log.read_text().splitlines()
            return next((line.split()[-1] for line in lines if "listening on http" in line), "")

        address = until(url)
        router = RouterProcess(address, httpx.Client(base_url=address, timeout=GUARD), log, process)
        routers.append(router)
        return router

    yield start
    for running in routers:
        left = _pids(running.http)
        running.http.close()
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(GUARD) == 0, running.log.read_text()
        assert not any(pid and alive(pid) for pid in left)
