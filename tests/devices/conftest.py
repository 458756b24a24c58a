"""Devices to test: one per lowering this machine can run, with two threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda.cards import fake_device
from running import BEST, EACH_LOWERING, can_run, jit_for
from tiers import chosen

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.lowerings import LOWERINGS
from llamado.devices.cuda.device import CudaDevice


@pytest.fixture(scope="session", params=[*EACH_LOWERING, *chosen(["cuda"], ())])
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice | CudaDevice]:
    """The CPU device with each lowering in turn; in full runs also the CUDA device on a fake card."""
    device = fake_device(total_bytes=1 << 28) if request.param == "cuda" else CpuDevice(2, jit=jit_for(request.param))
    yield device
    device.close()


@pytest.fixture(scope="session", params=EACH_LOWERING)
def cpu(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """The CPU device with each lowering in turn, for parts that other devices do not have."""
    device = CpuDevice(2, jit=jit_for(request.param))
    yield device
    device.close()


@pytest.fixture(scope="session")
def best() -> Iterator[CpuDevice]:
    """The device as this machine gets it."""
    device = CpuDevice(2, jit=jit_for(BEST))
    yield device
    device.close()


@pytest.fixture(scope="session")
def teams() -> Iterator[list[CpuDevice]]:
    """The device with one to four threads."""
    devices = [CpuDevice(n, jit=jit_for(BEST)) for n in (1, 2, 3, 4)]
    yield devices
    for device in devices:
        device.close()


@pytest.fixture(scope="session")
def lowerings() -> Iterator[dict[str, CpuDevice]]:
    """A device for every lowering that this machine can run."""
    devices = {name: CpuDevice(2, jit=jit_for(name)) for name in LOWERINGS if can_run(name)}
    yield devices
    for device in devices.values():
        device.close()
