"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.split.placement import Placement
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model

OpenModel = Callable[..., ModelRunner]


@pytest.fixture
def exits() -> Iterator[ExitStack]:
    """Return a context that closes engines and forward passes after the test, the last one first."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def jit() -> Jit:
    return Jit()


@pytest.fixture
def open_model(jit: Jit, exits: ExitStack) -> OpenModel:
    """Return a function that opens model files on devices of this machine; the runners close after the test."""

    def open_(
        path: Path,
        n_threads: int = 1,
        placement: Placement | None = None,
        *,
        n_devices: int = 1,
        load: Callable[[GGUFFile], Any] = load_model,
        mmap: bool = True,
        **options: Any,
    ) -> ModelRunner:
        file = GGUFFile.open(path, mmap=mmap)
        devices = [CpuDevice(n_threads, jit=jit) for _ in range(n_devices)]
        return exits.enter_context(closing(ModelRunner(file, load(file), devices, RunnerOptions(**options), placement)))

    return open_
