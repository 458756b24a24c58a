"""Load of cards as NVIDIA's management library (NVML) measures it, for all processes of the machine."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from typing import Any

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nvmlInit_v2": (),
    "nvmlDeviceGetHandleByPciBusId_v2": (c_char_p, c_void_p),
    "nvmlDeviceGetUtilizationRates": (c_void_p, c_void_p),
}
"""Parameter types. All functions return an nvmlReturn_t, an int."""


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: percent of the time since the last sample."""

    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class Nvml:
    """The management library. `library`: an object with the functions of libnvidia-ml.so.1."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, c_int

    @classmethod
    def open(cls, library: Any = None) -> Nvml | None:
        """Load and initialize the library. Return None if that is impossible."""
        try:
            nvml = cls(ctypes.CDLL("libnvidia-ml.so.1") if library is None else library)
        except (OSError, AttributeError):
            return None
        return None if nvml._library.nvmlInit_v2() else nvml

    def utilization(self, pci: str) -> float | None:
        """Return the share of the last moment (at most a second) in which a kernel ran on the card at a PCI address, 0
        to 1; None if the library has no number, as for a part of a card.
        """
        card, load = c_void_p(), _Utilization()
        failed = self._library.nvmlDeviceGetHandleByPciBusId_v2(
            pci.encode(), byref(card)
        ) or self._library.nvmlDeviceGetUtilizationRates(card, byref(load))
        return None if failed else load.gpu / 100
