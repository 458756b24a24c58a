"""This machine's processor in LLVM's terms, and `LLAMADO_CPU`, which hides some of its features.

On Linux on x86-64, LLVM's answer is kept on disk under a hash of what /proc/cpuinfo says of the processor, because
loading LLVM takes 0.1 s.

On ARM, LLVM's parser of /proc/cpuinfo finds neither dot products nor matrix products, and on macOS it finds nothing.
There the OS reports the features that lowerings need (`HWCAP_…` in Linux' asm/hwcap.h, `hw.optional.arm.FEAT_…` of
sysctl).
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from llamado.devices.cpu import machine_code
from llamado.devices.kernel_cache import KernelCache, cache_folder

# LLVM's name → (number of the auxiliary vector's entry, bit), name of Apple's sysctl
_ARM: dict[str, tuple[tuple[int, int], str]] = {
    "neon": ((16, 1), "AdvSIMD"),
    "lse": ((16, 8), "FEAT_LSE"),
    "dotprod": ((16, 20), "FEAT_DotProd"),
    "i8mm": ((26, 13), "FEAT_I8MM"),
}

_DESCRIBING = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
"""Lines of /proc/cpuinfo that what LLVM answers can depend on."""

LEVELS: dict[str, tuple[str, ...]] = {
    "avx2": ("avx512", "avx10", "avxvnni", "avxifma", "avxneconvert", "amx"),
    "avx-vnni": ("avx512", "avx10", "amx"),
    "avx512": ("amx",),
    "neon": ("i8mm", "sve", "sme"),
}
"""Values of `LLAMADO_CPU` → prefixes of the features that it hides."""


def processor() -> tuple[str, dict[str, bool]]:
    """Return the name and the features of this machine's processor, as LLVM spells them.

    `LLAMADO_CPU` hides features, as if this were a processor without them. Raises ValueError if it names no level.
    """
    text = _cpuinfo()
    name, features = _kept(text, cache_folder().with_name("processors")) if text else _of_llvm()
    return name, limited(features, os.environ.get("LLAMADO_CPU"))


def _of_llvm() -> tuple[str, dict[str, bool]]:
    import llvmlite.binding as llvm

    features = dict(llvm.get_host_cpu_features())
    if platform.machine() in ("aarch64", "arm64"):
        features |= _arm_features()
    return llvm.get_host_cpu_name(), features


@cache
def _kept(cpuinfo: str, folder: Path) -> tuple[str, dict[str, bool]]:
    """Return LLVM's answer for the processor that `cpuinfo` describes: from a file in `folder`, or from LLVM."""
    kept = KernelCache(("devices/cpu/lowerings/host.py",), [], folder, warns=False)
    symbol = kept.entry("processor", cpuinfo.encode())
    if (data := kept.read(symbol)) is not None:
        name, features = json.loads(data)
        return name, features
    found = _of_llvm()
    kept.write(symbol, json.dumps(found).encode())
    return found


def _cpuinfo() -> str:
    """Return the lines of /proc/cpuinfo that name a processor and its features; nothing where LLVM has to be loaded
    anyway.
    """
    if not machine_code.SUPPORTED:
        return ""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            first = file.read(1 << 16).decode().partition("\n\n")[0]
    except (OSError, UnicodeDecodeError):
        return ""
    lines = [line for line in first.splitlines() if line.partition("\t")[0].strip() in _DESCRIBING]
    return "\n".join(lines) if len(lines) == len(_DESCRIBING) else ""


def limited(features: Mapping[str, bool], level: str | None) -> dict[str, bool]:
    """Return the features without those that `level` hides. Raises ValueError for an unknown level."""
    if level and level not in LEVELS:
        raise ValueError(f"LLAMADO_CPU={level}: unknown; one of {', '.join(LEVELS)}")
    hidden = LEVELS[level] if level else ()
    return {name: on and not name.startswith(hidden) for name, on in features.items()}


def _arm_features() -> dict[str, bool]:
    libc = ctypes.CDLL(None)
    if sys.platform == "darwin":

        def has(name: str) -> bool:
            value, size = ctypes.c_int(0), ctypes.c_size_t(4)
            key = f"hw.optional.{name if name == 'AdvSIMD' else f'arm.{name}'}".encode()
            return libc.sysctlbyname(key, ctypes.byref(value), ctypes.byref(size), None, 0) == 0 and value.value == 1

        return {feature: has(name) for feature, (_, name) in _ARM.items()}
    if sys.platform != "linux":
        return {}
    libc.getauxval.restype = ctypes.c_ulong
    libc.getauxval.argtypes = [ctypes.c_ulong]
    return {feature: bool(libc.getauxval(entry) >> bit & 1) for feature, ((entry, bit), _) in _ARM.items()}
