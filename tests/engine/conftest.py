"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
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


@pytest.fixture(autouse=True)
def few_graphs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a loaded model prepare two graphs ahead: those of one token and of a full batch.

    A server prepares ten before its first request and dozens while it is idle. A test needs few of them, and a batch
    that has no graph gets one. `test_graph_shapes.py` checks which shapes are prepared; files that load models as a
    server does override this fixture.
    """
    warm_up = ModelRunner.warm_up

    def warm_up_few(self: ModelRunner, batch_sizes: list[int], *given: Any) -> None:
        warm_up(self, sorted({min(batch_sizes), max(batch_sizes)}), *given)
        self._graphs._ahead.clear()

    monkeypatch.setattr(ModelRunner, "warm_up", warm_up_few)


@pytest.fixture(scope="module")
def jit() -> Jit:
    return Jit()


@pytest.fixture(scope="module")
def keep_model(jit: Jit) -> Iterator[OpenModel]:
    """Return a function that opens a model file, and for the same arguments the same runner, whose cells are free.

    Building the graphs takes most of the time of a small model. The cells hold noise, so that a test cannot find the
    right values of an earlier one.
    """
    kept: dict[str, ModelRunner] = {}
    with ExitStack() as stack:

        def open_(
            path: Path, n_threads: int = 1, *, load: Callable[[GGUFFile], Any] = load_model, **options: Any
        ) -> ModelRunner:
            key = repr((path, n_threads, load, sorted(options.items())))
            if key not in kept:
                file = GGUFFile.open(path)
                device = CpuDevice(n_threads, jit=jit)
                kept[key] = stack.enter_context(
                    closing(ModelRunner(file, load(file), [device], RunnerOptions(**options)))
                )
            runner = kept[key]
            runner.memory.clear()
            for tensor in runner.memory.tensors:  # the last row may be the state of a sequence without tokens
                noise = np.full((tensor.ne[1] - 1) * tensor.nb[1], 0x3C, np.uint8)
                runner.devices[0].write(tensor, noise)
            return runner

        yield open_


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
