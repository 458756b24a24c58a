"""The first elements of rows by machine code: those that numpy's stable sort gives, in every lowering."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from running import BEST, jit_for

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.top_rows import MAX_K, TopRows

Array = np.ndarray[Any, Any]


def sorted_top(row: Array, k: int) -> tuple[Array, Array]:
    order = np.argsort(-row, kind="stable")[:k]
    return order, row[order]


def random_rows(n: int, random: np.random.Generator) -> list[Array]:
    """Rows as models give them, and awkward ones: ties, masked elements, one value, order of all kinds."""
    normal = random.standard_normal(n).astype(np.float32)
    masked = np.where(random.random(n) < 0.9, -np.inf, normal).astype(np.float32)
    together = normal.copy()
    together[: min(n, 70)] += 10  # the greatest lie side by side
    zeros = np.zeros(n, np.float32)
    zeros[random.integers(0, n, 3)] = -0.0
    return [
        normal, masked, together, zeros,
        random.integers(0, 4, n).astype(np.float32), np.sort(normal), np.sort(normal)[::-1].copy(),
        np.full(n, -np.inf, np.float32),
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 7, 64, 65, 300, 5000, 49152])
def test_the_first_of_rows(cpu: CpuDevice, n: int) -> None:
    random = np.random.default_rng(n)
    find = TopRows(cpu.jit)
    for k in sorted({min(k, n) for k in (1, 2, 40, 64, 1000)}):
        rows = random_rows(n, random)
        ks = [min(k + i % 2, n) for i in range(len(rows))]
        for row, own, found in zip(rows, ks, find(rows, ks), strict=True):
            assert found is not None
            places, values = sorted_top(row, own)
            assert found[0].tolist() == places.tolist()
            assert found[1].tobytes() == values.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.nan])
@pytest.mark.parametrize("at", [0, 63, 64, 299, -1])
def test_rows_with_nan(bad: float, at: int) -> None:
    random = np.random.default_rng(3)
    rows = [random.standard_normal(333).astype(np.float32) for _ in range(3)]
    rows[1][at] = bad
    first, second, third = TopRows(jit_for(BEST))(rows, [5, 40, 1])
    assert second is None and first is not None and third is not None
    assert third[0].tolist() == [int(rows[2].argmax())]


def test_invalid_rows_are_rejected() -> None:
    find = TopRows(jit_for(BEST))
    row = np.zeros(100, np.float32)
    for rows, ks in (
        ([row, row[:99]], [1, 1]),
        ([row.astype(np.float64)], [1]),
        ([np.zeros(200, np.float32)[::2]], [1]),
    ):
        with pytest.raises(ValueError, match="no row"):
            find(rows, ks)  # type: ignore[arg-type]
    for k in (0, 101, MAX_K + 1):
        with pytest.raises(ValueError, match="elements"):
            find([row], [k])


def test_results_outlive_the_next_call() -> None:
    find = TopRows(jit_for(BEST))
    row = np.arange(100, dtype=np.float32)
    first = find([row], [3])[0]
    find([-row], [3])
    assert first is not None and first[0].tolist() == [99, 98, 97]
