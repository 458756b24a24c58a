"""The CPU back end (`devices/registry.py`): one device, which is always available."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamado.devices.device import Device, DeviceError, DeviceLost
from llamado.devices.registry import DeviceOptions, LocalBackend, WaitCallback

if TYPE_CHECKING:
    from llamado.devices.cpu.jit import Jit


def compiler_of(device: Device) -> Jit:
    """Return the compiler of the CPU device, so that a process has one; for other devices a new one."""
    from llamado.devices.cpu.device import CpuDevice
    from llamado.devices.cpu.jit import Jit

    return device.jit if isinstance(device, CpuDevice) else Jit()


class CpuBackend(LocalBackend):
    """Makes the CPU device. Compiler and kernels are imported on first use."""

    def __init__(self, places: Sequence[str], options: DeviceOptions) -> None:
        self._options = options

    def devices(self, wait: float = 0.0, waiting: WaitCallback | None = None) -> list[Device]:
        from llamado.devices.cpu.device import CpuDevice

        options = self._options
        return [CpuDevice(options.n_threads, options.n_threads_batch, numa=options.numa)]

    def reconnect(self, lost: Device, timeout: float = 2.0) -> Device:
        raise DeviceLost(lost.name, "the CPU device of this process cannot be reconnected")

    def open(self, place: str) -> list[Device]:
        raise DeviceError(f"the CPU device takes no place: {place}")
