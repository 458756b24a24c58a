"""This machine's processor as a back end (`devices/registry.py`): one device, which is always there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamado.devices.device import Device, DeviceError, DeviceLost
from llamado.devices.registry import DeviceOptions, Waiting
from llamado.gguf.types import TensorType

if TYPE_CHECKING:
    from llamado.devices.cpu.jit import Jit


def compiler_of(device: Device) -> Jit:
    """The compiler that this machine's device has, so that a process has one; a new one for other devices."""
    from llamado.devices.cpu.device import CpuDevice
    from llamado.devices.cpu.jit import Jit

    return device.jit if isinstance(device, CpuDevice) else Jit()


class CpuBackend:
    """Makes CpuDevice. Compiler and kernels are imported when they are needed."""

    def __init__(self, places: Sequence[str], options: DeviceOptions) -> None:
        self._options = options

    def connect(self, timeout: float | None = None) -> list[list[Device]]:
        return [self.devices()]

    def devices(self, wait: float = 0.0, waiting: Waiting | None = None) -> list[Device]:
        from llamado.devices.cpu.device import CpuDevice

        options = self._options
        return [CpuDevice(options.n_threads, options.n_threads_batch, numa=options.numa)]

    def reconnect(self, lost: Device, timeout: float = 2.0) -> Device:
        raise DeviceLost(lost.name, "it is of this process")

    def expect_answers(self, seconds: float | None) -> None:
        pass

    def open(self, place: str) -> list[Device]:
        raise DeviceError(f"{place} is no place of this machine's processor")

    def add(self, place: str, devices: Sequence[Device]) -> None:
        pass

    def remove(self, place: str) -> None:
        pass

    def weight_types(self) -> frozenset[TensorType]:
        from llamado.devices.cpu.kernels.formats import FORMATS

        return frozenset(FORMATS)
