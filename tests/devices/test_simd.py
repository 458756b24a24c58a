"""The SIMD language: constants, and functions within kernels (`Code.call`)."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from running import Array, jit_for
from tiers import first_of

from llamado.devices.cpu.lowerings import LOWERINGS
from llamado.devices.kernel import kernel
from llamado.devices.simd import F32, Code, F32x8, Value, Work


@kernel("x")
def both_zeros(c: Code, a: SimpleNamespace, work: Work) -> None:
    c.store(a.x, c.f32(0.0))
    c.store(a.x + 4, c.f32(-0.0))
    c.store(a.x + 8, c.const(F32x8, 0.0))
    c.store(a.x + 40, c.const(F32x8, [0.0, -0.0] * 4))


def test_constants_keep_the_sign_of_zero() -> None:
    x = np.ones(18, np.float32)
    fields = np.array(both_zeros.pack({"x": x.ctypes.data}), np.int64)
    jit_for("portable").function(both_zeros)(fields.ctypes.data, 0, 1, 0, 0)
    assert np.signbit(x).nonzero()[0].tolist() == [1, 11, 13, 15, 17]
    assert not x.any()


@kernel("x", "y")
def product_of_lanes(c: Code, a: SimpleNamespace, work: Work) -> None:
    v = c.load(F32x8, a.x)
    for n in (4, 2, 1):
        v = c.shuffle(v, None, range(n)) * c.shuffle(v, None, range(n, 2 * n))
    c.store(a.y, v.lane(0))


def test_vectors_may_have_one_lane() -> None:
    x, y = np.arange(1, 9, dtype=np.float32), np.zeros(1, np.float32)
    fields = np.array(product_of_lanes.pack({"x": x.ctypes.data, "y": y.ctypes.data}), np.int64)
    jit_for("portable").function(product_of_lanes)(fields.ctypes.data, 0, 1, 0, 0)
    assert y[0] == 40320


class Row(NamedTuple):
    """An address, a constant and a vector that is passed at run time."""

    at: Value
    step: int
    scale: Value


def add_to(c: Code, row: Row, plus: Value, *, times: int) -> None:
    for i in range(times):
        at = row.at + i * row.step
        c.store(at, c.load(F32x8, at) * row.scale + plus.splat(8))


def add_twice(c: Code, row: Row, plus: Value) -> None:
    c.call(add_to, row, plus, times=1)
    c.call(add_to, row._replace(at=row.at + row.step), plus, times=1)


@kernel("x", "n")
def many_calls(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Change ten rows of eight numbers, `n` of them in a loop."""
    two = c.const(F32x8, 2.0)
    with c.range(0, a.n) as i:
        c.call(add_to, Row(a.x + i * 32, 32, two), c.f32(1.0), times=1)
    c.call(add_to, Row(a.x + 4 * 32, 32, two * two), c.f32(5.0), times=2)
    c.call(add_to, Row(a.x + 6 * 32, 64, two), c.f32(7.0), times=2)
    c.call(add_twice, Row(a.x + 7 * 32, 64, two), c.load(F32, a.x))


def expected(x: Array) -> Array:
    y = x.copy()
    y[:4] = y[:4] * 2 + 1
    y[4:6] = y[4:6] * 4 + 5
    y[[6, 8]] = y[[6, 8]] * 2 + 7
    y[[7, 9]] = y[[7, 9]] * 2 + y[0, 0]
    return y


@pytest.mark.parametrize("lowering", first_of(LOWERINGS))
def test_functions_get_their_values_and_constants(lowering: str) -> None:
    x = np.arange(80, dtype=np.float32).reshape(10, 8)
    right = expected(x)
    fields = np.array(many_calls.pack({"x": x.ctypes.data, "n": 4}), np.int64)
    jit_for(lowering).function(many_calls)(fields.ctypes.data, 0, 1, 0, 0)
    np.testing.assert_array_equal(x, right)


def test_calls_with_equal_constants_share_a_function() -> None:
    """Two steps, with one turn or two each, of `add_to`."""
    labels = re.findall(r"^(add_\w+)\.\d+:", jit_for("portable").assembly(many_calls), re.MULTILINE)
    assert sorted(labels) == ["add_to"] * 4 + ["add_twice"]
