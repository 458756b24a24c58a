"""Lowerings: what each instruction set does better than plain LLVM arithmetic, and the choice of one for a CPU."""

from __future__ import annotations

import os

from llamado.devices.cpu.lowerings.arm import I8MM, NEON
from llamado.devices.cpu.lowerings.host import processor
from llamado.devices.cpu.lowerings.permission import tiles_permitted
from llamado.devices.cpu.lowerings.x86 import AMX, AVX2, AVX_VNNI, VNNI, VNNI_256
from llamado.devices.lowering import PORTABLE, Lowering

LOWERINGS = {lowering.name: lowering for lowering in (PORTABLE, AVX2, AVX_VNNI, VNNI_256, VNNI, AMX, NEON, I8MM)}
"""In ascending order of preference."""


def can_run(lowering: Lowering, features: dict[str, bool]) -> bool:
    """Return True if a processor with these features (LLVM's names) can run a lowering, and the OS permits it."""
    return all(features.get(name) for name in lowering.needs) and (not lowering.tiles or tiles_permitted())


def choose(features: dict[str, bool]) -> Lowering:
    """Return the best lowering for a CPU's features. LLAMADO_SIMD overrides it with the name of one that the CPU can
    run.
    """
    able = {name: lowering for name, lowering in LOWERINGS.items() if can_run(lowering, features)}
    forced = os.environ.get("LLAMADO_SIMD")
    if not forced:
        return list(able.values())[-1]
    if forced not in able:
        raise ValueError(f"LLAMADO_SIMD={forced}: not on this processor; one of {', '.join(able)}")
    return able[forced]


def of_this_machine() -> Lowering:
    """Return the lowering that this machine computes with."""
    return choose(processor()[1])
