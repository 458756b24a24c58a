"""Fixtures of the server's tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_processes import ServerProcess, Source
from waiting import until


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutine functions in an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def few_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exclude all objects of earlier tests from collections.

    Unloading a model collects all objects, which takes up to a second among the modules of all tests.
    """
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(scope="session")
def source() -> Iterator[Source]:
    one = Source()
    yield one
    one.end()


@pytest.fixture
def fake_server(source: Source, tmp_path: Path) -> Iterator[Callable[..., tuple[ServerProcess, str]]]:
    """Return a function that starts `fake_server.py` and returns the process and its address once the port is open."""
    processes: list[ServerProcess] = []

    def start(*options: str) -> tuple[ServerProcess, str]:
        port_file = tmp_path / f"port{len(processes)}"
        process = ServerProcess(source, tmp_path / f"log{len(processes)}", [str(port_file), *options])
        processes.append(process)
        port = until(
            lambda: port_file.exists() and port_file.read_text(),
            lambda: f"the server did not open its port: {process.log()}",
        )
        return process, f"http://127.0.0.1:{port}"

    yield start
    for process in processes:
        process.end()
