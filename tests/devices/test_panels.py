"""Formats read rows of weights through the panel alone, so that a device can read them in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from running import CODEBOOKS, WEIGHTS, Case, jit_for, new, values, weight_bytes
from tiers import chosen

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.lowerings import PORTABLE
from llamado.devices.kernels import matmul
from llamado.devices.kernels.formats.panel import Indices, Panel
from llamado.devices.simd import I32, Code, Type, Value
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T


class ReversedPanel(Panel):
    """Holds its rows in reverse and reads them cell by cell: the lanes are still those of the rows."""

    def __init__(self, c: Code, rows: Sequence[Value], block_bytes: int) -> None:
        super().__init__(c, rows[::-1], block_bytes)

    def _turned(self, v: Value) -> Value:
        return self._c.shuffle(v, None, range(self.n)[::-1])

    def gather(self, elem: Type, offset: int) -> Value:
        return self._turned(super().gather(elem, offset))

    def cells(self, offset: int, n: int) -> list[Value]:
        return [self.gather(I32, offset + 4 * k) for k in range(n)]

    def indices_at(self, offset: int) -> Indices:
        return super().indices_at(offset)[::-1]


@pytest.mark.slow
@pytest.mark.parametrize("type", chosen((*WEIGHTS, *CODEBOOKS), (T.NVFP4,), lambda t: str(t.name)))
def test_products_do_not_depend_on_the_panel(type: T, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = new(256, 11, type=type), new(256, 2)
    product = Case({"y": g.mul_mat(w, x)}, {w: weight_bytes(type, 256, 11), x: values(256, 2)})
    expected = product.run(CpuDevice(1, jit=jit_for("portable")))["y"]
    monkeypatch.setattr(matmul, "Panel", ReversedPanel)
    found = product.run(CpuDevice(1, jit=Jit(PORTABLE, tmp_path)))["y"]
    assert found.tobytes() == expected.tobytes()
