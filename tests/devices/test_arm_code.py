"""What products become on 64-bit ARM, as text: `tests/arm.sh` runs it."""

from __future__ import annotations

import re

import pytest

from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.kernels import matmul
from llamado.devices.cpu.lowerings.arm import NEON


@pytest.mark.parametrize("columns", [1, 4])
def test_four_operands_are_loaded_at_once(columns: int) -> None:
    """Eight groups of 32 weights of eight rows, and each lane of a register of activations as often as the others."""
    jit = Jit(NEON, host=("generic", dict.fromkeys(NEON.needs, True)), triple="aarch64-unknown-linux-gnu")
    code = jit.assembly(matmul.matmul_few, weights="Q4_1", columns=columns, near=False, panel_rows=8)
    lanes = re.findall(r"sdot\s.*\.4b\[(\d)\]", code)
    assert len(lanes) == code.count("sdot") == 8 * 2 * columns
    assert {lane: lanes.count(lane) for lane in "0123"} == dict.fromkeys("0123", 4 * columns)
