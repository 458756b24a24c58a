"""Layout of weights, columns and sums in ARM's matrix products, with its instructions emulated on any machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running import WEIGHTS, Array, Case, new, values, weight_bytes

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.lowerings.arm import I8MM, NEON
from llamado.devices.simd import I8, I64, Code, I32x4, Type, Value
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T

pytestmark = pytest.mark.full

_plainly = Code.intrinsic


def spelled(c: Code, name: str, result: Type | None, arguments: Sequence[Any]) -> Value:
    """Compute an instruction as Arm's reference describes it."""
    word = name.removeprefix("llvm.aarch64.neon.").partition(".")[0]
    if word == "tbl1":
        table, numbers = arguments
        address = c.scratch(table.type.bytes)
        c.store(address, table)
        return c.vector([c.load(I8, address + numbers.lane(k).zext(I64)) for k in range(16)])
    if word == "sdot":  # four bytes by four for each of four sums
        lanes, n = [(4 * i, 4 * i) for i in range(4)], 4
    elif word == "smmla":  # two rows of eight bytes by two: a sum for each two of them
        lanes, n = [(8 * r, 8 * s) for r in range(2) for s in range(2)], 8
    else:
        return _plainly(c, name, result, arguments)
    total, a, b = arguments
    for k in range(n):
        of_a, of_b = (c.shuffle(v, None, [lane[i] + k for lane in lanes]).to(I32x4) for i, v in enumerate((a, b)))
        total = total + of_a * of_b
    assert isinstance(total, Value)
    return total


@pytest.fixture(scope="module", params=[NEON, I8MM], ids=lambda lowering: lowering.name)
def emulated(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """A device that computes as one with these instructions.

    Its kernels are kept like all others, by a name that says which file spelled the instructions: there are hundreds.
    """
    spelling = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Code, "intrinsic", spelled)
        jit = Jit(replace(request.param, name=f"{request.param.name} as in {spelling}", needs=()))
        device = CpuDevice(2, jit=jit)
        yield device
        device.close()


def multiply(device: CpuDevice, type: T, raw: Array, n: int, x: Array) -> Array:
    """Columns x [matrices, columns, n] times as many matrices of 19 rows."""
    w, b = new(n, 19, len(x), type=type), new(n, x.shape[1], len(x))
    return Case({"y": g.mul_mat(w, b)}, {w: raw, b: x}).run(device)["y"][0]


@pytest.mark.parametrize("type", WEIGHTS, ids=lambda t: t.name)
def test_bits_are_those_of_other_instructions(emulated: CpuDevice, best: CpuDevice, type: T) -> None:
    n = 2 * type.block_size
    raw, x = weight_bytes(type, n, 19), values(n, 9, 1)
    for columns in (1, 2, 4, 9):
        found = multiply(emulated, type, raw, n, x[:, :columns])
        assert found.tobytes() == multiply(best, type, raw, n, x[:, :columns]).tobytes(), columns


def test_bits_of_columns_that_lie_apart(emulated: CpuDevice, best: CpuDevice) -> None:
    """The columns belong to several matrices."""
    raw, x = weight_bytes(T.Q6_K, 512, 3 * 19), values(512, 9, 3)
    found = multiply(emulated, T.Q6_K, raw, 512, x)
    assert found.tobytes() == multiply(best, T.Q6_K, raw, 512, x).tobytes()
