"""Copies between strides and plain types against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from running import Case, check, new, values

from llamado.devices.cpu.device import CpuDevice
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T

PLAIN = (T.F32, T.F16, T.BF16, T.I32)


@pytest.mark.parametrize("source", PLAIN, ids=lambda t: t.name)
@pytest.mark.parametrize("target", PLAIN, ids=lambda t: t.name)
def test_casts(device: CpuDevice, source: T, target: T) -> None:
    for ne in ((1,), (13,), (5, 3, 2, 2)):
        a = new(*ne, type=source)
        x = np.trunc(values(*ne, scale=50)) if T.I32 in (source, target) else values(*ne)
        found = check(device, g.cast(a, target), {a: x}, rtol=0, atol=0)
        assert found.any()


def test_permuted_and_transposed_tensors_are_straightened(device: CpuDevice) -> None:
    x = new(7, 5, 3, 2)
    data = {x: values(7, 5, 3, 2)}
    for axes in ((1, 0, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        check(device, g.cont(g.permute(x, *axes)), data, rtol=0, atol=0)
    flat = new(9, 4, type=T.F16)
    check(device, g.cont(g.transpose(flat)), {flat: values(9, 4)}, rtol=0, atol=0)
    check(device, g.dup(x), data, rtol=0, atol=0)
    check(device, g.cont(x, 35, 6), data, rtol=0, atol=0)


def test_a_part_is_written_into_a_cache(device: CpuDevice) -> None:
    for type in (T.F32, T.F16, T.BF16):
        x, cache = new(6, 4), new(10, 8, type=type)
        before = values(10, 8, seed=2)
        target = g.view_2d(cache, 6, 4, cache.nb[1], 2 * cache.nb[1] + 3 * cache.type.block_bytes)
        written = g.cpy(x, target)
        case = Case({"part": written, "again": g.cont(written)}, {x: values(6, 4), cache: before})
        case.check(device, rtol=0, atol=0)


def test_another_shape_of_the_same_elements(device: CpuDevice) -> None:
    x, y = new(12, 5), new(20, 3, type=T.F16)
    check(device, g.cpy(x, y), {x: values(12, 5)}, rtol=0, atol=0)
    whole = new(12, 5)
    gaps = g.view_2d(whole, 10, 5, 48)
    check(device, g.cpy(gaps, new(25, 2)), {whole: values(12, 5)}, rtol=0, atol=0)
    target = new(30, 2)
    check(device, g.cpy(gaps, g.view_2d(target, 25, 2, 120)), {whole: values(12, 5)}, rtol=0, atol=0)
