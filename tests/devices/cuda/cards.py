"""CUDA devices without a card: the fake library, whose launches run in the emulation.

With LLAMADO_TEST_CUDA=real they are the first card of this machine (`tests/cuda.sh`).
"""

from __future__ import annotations

import os
from typing import Any

from cuda.fake_libcuda import FakeCard, FakeLibrary, FakeMemory
from llamado.devices.cuda.device import CudaDevice
from llamado.devices.cuda.driver import Driver
from llamado.devices.cuda.jit import PtxImages
from llamado.devices.cuda.lowerings import emulated


def run(
    image: bytes, symbol: str, memory: FakeMemory, grid: tuple[int, int], threads: int, shared_bytes: int,
    arguments: tuple[int, ...],
) -> None:  # fmt: skip
    """Run a kernel of the fake library in the emulation."""
    emulated.launch(image, memory, grid, threads, shared_bytes, arguments)


def run_watched(
    image: bytes, symbol: str, memory: FakeMemory, grid: tuple[int, int], threads: int, shared_bytes: int,
    arguments: tuple[int, ...],
) -> None:  # fmt: skip
    """Run a kernel in the emulation, and fail if it has races."""
    emulated.launch(image, memory, grid, threads, shared_bytes, arguments, emulated.Watch())


def fake_device(*, watched: bool = False, **card: Any) -> CudaDevice:
    """A device on a fake card. `watched`: find races; give it little memory then."""
    if os.environ.get("LLAMADO_TEST_CUDA") == "real":
        opened = Driver().open(0)
        return CudaDevice(opened, PtxImages(opened))
    library = FakeLibrary(run_watched if watched else run, [FakeCard(**card)])
    return CudaDevice(Driver(library).open(0), emulated.EmulatedImages())
