"""Assembly of matrix products for 64-bit ARM, checked as text; `tests/arm.sh` runs it."""

from __future__ import annotations

import re

import pytest

from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.lowerings.arm import I8MM, NEON
from llamado.devices.kernels import matmul
from llamado.devices.lowering import Lowering


def code(lowering: Lowering, weights: str, columns: int) -> str:
    """The kernel of few columns."""
    jit = Jit(lowering, host=("generic", dict.fromkeys(lowering.needs, True)), triple="aarch64-unknown-linux-gnu")
    return jit.assembly(matmul.matmul_few, weights=weights, columns=columns, near=False, panel_rows=8)


@pytest.mark.parametrize(("lowering", "columns"), [(NEON, 1), (NEON, 4), (I8MM, 1)])
def test_four_operands_are_loaded_at_once(lowering: Lowering, columns: int) -> None:
    """Eight groups of 32 weights of eight rows, and each lane of a register of activations as often as the others."""
    found = code(lowering, "Q4_1", columns)
    lanes = re.findall(r"sdot\s.*\.4b\[(\d)\]", found)
    assert len(lanes) == found.count("sdot") == 8 * 2 * columns
    assert {lane: lanes.count(lane) for lane in "0123"} == dict.fromkeys("0123", 4 * columns)


@pytest.mark.parametrize("columns", [2, 4])
def test_two_rows_are_multiplied_with_two_columns(columns: int) -> None:
    """Four pairs of rows and half as many of columns as there are columns, eight numbers at a time."""
    found = code(I8MM, "Q4_1", columns)
    assert found.count("smmla") == 4 * columns // 2 * 4 and "sdot" not in found
