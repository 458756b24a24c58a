"""Fingerprint of what the bits of results depend on; the CPU and cards have the same."""

from __future__ import annotations

from functools import cache

from llamado.devices.kernel_cache import SHARED_SOURCES, source_hash

_DECIDING_SOURCES = ("devices/compile", "devices/cpu", "devices/cuda")
"""Folders of the package with kernels of one device, and with the choice among kernels."""


@cache
def numerics() -> str:
    """Return the fingerprint: of the compiler, the sources of kernels, and those that choose among them. Processors,
    cards and lowerings do not change the bits.
    """
    import llvmlite

    return f"{llvmlite.__version__} {source_hash(*SHARED_SOURCES, *_DECIDING_SOURCES).hex()[:32]}"
