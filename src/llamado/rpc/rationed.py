"""A compiler of kernels that strangers cannot keep busy for ever, or fill memory with."""

from __future__ import annotations

from typing import Any

from llamado.devices.cpu.jit import Jit, Kernel
from llamado.devices.device import DeviceError


class NoKernelsLeft(DeviceError):
    """A client's graphs need more different kernels than they may have made."""


class RationedJit(Jit):
    """Makes or loads only `allowance` more kernels; those that are there already cost nothing."""

    allowance = 1 << 30

    def compile(self, kernel: Kernel, symbol: str, parameters: dict[str, Any]) -> bytes:
        """Raises NoKernelsLeft."""
        self._check()
        return super().compile(kernel, symbol, parameters)

    def _load(self, code: bytes, symbol: str) -> int:
        self._check()
        self.allowance -= 1
        return super()._load(code, symbol)

    def _check(self) -> None:
        if self.allowance <= 0:
            raise NoKernelsLeft("this client's graphs need more different kernels than any model does")
