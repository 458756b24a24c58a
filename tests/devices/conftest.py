"""Devices to test: one per lowering this machine can run, with two threads."""

from __future__ import annotations

from collections.abc import Iterator

import llvmlite.binding as llvm
import pytest

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.lowering import LOWERINGS, choose

_NEEDS = {"portable": (), "avx2": ("avx2", "fma", "f16c"), "vnni": ("avx512vnni", "avx512vl", "avx512bw")}
_BEST = choose(dict(llvm.get_host_cpu_features())).name


def can_run(lowering: str) -> bool:
    """Whether this machine has the instructions of a lowering."""
    features = llvm.get_host_cpu_features()
    return all(features.get(name) for name in _NEEDS[lowering])


_jits: dict[str, Jit] = {}


def jit_for(lowering: str) -> Jit:
    """One Jit per lowering for the whole session: a kernel is loaded once."""
    if not can_run(lowering):
        pytest.skip(f"this machine has no {' '.join(_NEEDS[lowering])}")
    if lowering not in _jits:
        _jits[lowering] = Jit(LOWERINGS[lowering])
    return _jits[lowering]


@pytest.fixture(scope="session", params=sorted(LOWERINGS, key=lambda name: name != _BEST))
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """The device with each lowering in turn."""
    device = CpuDevice(2, jit=jit_for(request.param))
    yield device
    device.close()


@pytest.fixture(scope="session")
def best() -> Iterator[CpuDevice]:
    """The device as this machine gets it."""
    device = CpuDevice(2, jit=jit_for(_BEST))
    yield device
    device.close()


@pytest.fixture(scope="session")
def teams() -> Iterator[list[CpuDevice]]:
    """The device with one, two and three threads."""
    devices = [CpuDevice(n, jit=jit_for(_BEST)) for n in (1, 2, 3)]
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
