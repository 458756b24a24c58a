"""A type of weights that no file has: one class is all that the CPU device needs to multiply it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import EACH_LOWERING, Array, Case, jit_for, new, values
from tiers import chosen

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.kernels.formats import FORMATS, bits
from llamado.devices.kernels.formats.format import Block32, Blocks32
from llamado.devices.kernels.formats.panel import Panel
from llamado.devices.simd import Code
from llamado.ggml import graph as g
from llamado.ggml import tensor
from llamado.gguf import types
from llamado.gguf.types import TensorType as T

NUMBER = 33  # ggml took it back
BLOCK = np.dtype([("unused", "u1"), ("nibbles", "u1", 16), ("also unused", "u1", 3), ("d", "<f2")])


class MadeUp(Blocks32):
    """Weight type like Q4_0 with the scale at the end, behind unused bytes."""

    peak, zero_shift = 15, 3

    def unpack(self, c: Code, panel: Panel) -> Iterable[Block32]:
        return [Block32(bits.nibbles(panel.cells(1, 4)), panel.halves(20))]


@pytest.fixture(params=EACH_LOWERING)
def device(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuDevice]:
    """A device whose registry has one line more."""
    number: Any = int.__new__(T, NUMBER)
    number._name_, number._value_ = "MADE_UP", NUMBER
    monkeypatch.setitem(T._member_map_, "MADE_UP", number)
    monkeypatch.setitem(T._value2member_map_, NUMBER, number)
    monkeypatch.setitem(types._LAYOUT, number, (32, BLOCK.itemsize))
    tensor.BLOCK[NUMBER] = (32, BLOCK.itemsize)
    monkeypatch.setattr(MadeUp, "type", number, raising=False)
    monkeypatch.setitem(FORMATS, number, MadeUp())
    device = CpuDevice(2, jit=Jit(jit_for(request.param).lowering, tmp_path))  # its kernels are kept nowhere else
    yield device
    device.close()
    tensor.BLOCK[NUMBER] = (0, 0)


def blocks(rows: int, n: int) -> Array:
    """Random weights, and random bytes where nothing is read."""
    rng = np.random.default_rng(rows)
    made = np.frombuffer(rng.bytes(rows * n // 32 * BLOCK.itemsize), BLOCK).reshape(rows, n // 32).copy()
    made["d"] = rng.uniform(0.001, 0.1, made.shape)
    return made


def quants(made: Array) -> Array:
    """Whole numbers of the weights, (rows, blocks, 32)."""
    nibbles = made["nibbles"].astype(np.int64)
    return np.concatenate([nibbles & 15, nibbles >> 4], axis=-1) - 8


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a·b + c, rounded once: of the numbers next to the one rounded twice the nearest to the exact one."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))
    candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1))


def product(made: Array, x: Array) -> Array:
    """The numerics of every product: for each block the exact integer sum, then one fused multiply-add."""
    whole = x.reshape(len(x), -1, 32)
    peak = np.abs(whole).max(axis=-1, keepdims=True)
    numbers = np.rint(whole * (np.float32(127) / peak)).astype(np.int64)
    scales = (peak[..., 0] / np.float32(127)).astype(np.float16).astype(np.float32)
    sums = np.einsum("rbk,cbk->crb", quants(made), numbers).astype(np.float32)
    steps = made["d"].astype(np.float32)[None] * scales[:, None]
    total = np.zeros(sums.shape[:2], np.float32)
    for block in range(sums.shape[2]):
        flat = zip(sums[..., block].ravel(), steps[..., block].ravel(), total.ravel(), strict=True)
        total = np.array([fma(*numbers) for numbers in flat], np.float32).reshape(total.shape)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("columns", chosen([1, 3, 9, 40], (3, 40), lambda n: f"{n} columns"))
def test_products_have_the_bits_of_the_formula(device: CpuDevice, columns: int) -> None:
    """One column, a group of them, several groups, and panels of unpacked rows."""
    n, rows = 96, 11
    made, x = blocks(rows, n), values(n, columns, seed=columns)
    w, b = new(n, rows, type=T["MADE_UP"]), new(n, columns)
    found = Case({"y": g.mul_mat(w, b)}, {w: made.view(np.uint8).reshape(-1), b: x}).run(device)["y"][0, 0]
    assert found.tobytes() == product(made, x).tobytes()


@pytest.mark.slow
def test_its_rows_are_a_table(device: CpuDevice) -> None:
    made, ids = blocks(7, 64), np.array([[6, 0, 3]])
    w, b = new(64, 7, type=T["MADE_UP"]), new(3, type=T.I32)
    found = Case({"y": g.get_rows(w, b)}, {w: made.view(np.uint8).reshape(-1), b: ids}).run(device)["y"][0, 0]
    weights = quants(made).astype(np.float32) * made["d"].astype(np.float32)[..., None]
    assert found.tobytes() == weights.reshape(7, 64)[ids[0]].tobytes()
