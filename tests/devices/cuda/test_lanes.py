"""The SIMD language on a GPU: every operation gives the CPU's bits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from cuda.emulation import emulated, on_cpu
from llamado.devices.cpu.jit import Jit
from llamado.devices.kernel import Kernel
from llamado.devices.simd import (
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    Code,
    F16x8,
    F32x8,
    I8x8,
    I8x32,
    I16x8,
    I16x16,
    I32x4,
    I32x8,
    Type,
    Value,
    Work,
)  # fmt: skip

Probe = Callable[[Code, Value], list[Value]]

PROBES: dict[str, Probe] = {
    "arithmetic": lambda c, x: [
        c.load(F32x8, x) + c.load(F32x8, x + 32), c.load(F32x8, x) * c.load(F32x8, x + 32) - 3.0,
        c.load(F32x8, x) / c.load(F32x8, x + 32), -c.load(F32x8, x), 2.0 - c.load(F32x8, x),
    ],
    "integers": lambda c, x: [
        c.load(I32x8, x) * 77 + c.load(I32x8, x + 32), c.load(I32x8, x) >> 3, c.load(I32x8, x).sar(5),
        c.load(I64, x) // 1000, c.load(I64, x) % 999, c.load(I32x8, x) ^ -1, -c.load(I32x8, x),
    ],
    "bytes": lambda c, x: [
        c.load(I8x32, x) & 15, c.load(I8x32, x) >> 4, c.load(I8x32, x) << 3, c.load(I8x32, x) - 32,
        c.load(I8x32, x) | c.load(I8x32, x + 32), c.load(I8x32, x).bits(I32x8) + 1, c.load(I8x8, x).zext(I32x8),
        c.load(I8x8, x).to(I32x8), c.load(I8x8, x).bits(I32._replace(lanes=2)).lane(1),
        c.select((c.load(I8x32, x) & 4).equals(4), c.load(I8x32, x), c.load(I8x32, x + 32)),
        c.select(c.load(I8x32, x).differs(c.load(I8x32, x + 32) & 3), c.load(I8x32, x), c.load(I8x32, x + 32)),
        c.load(I8x32, x) + c.load(I8x32, x + 32), c.load(I8x32, x) - c.load(I8x32, x + 32),
        c.load(I16x16, x) + c.load(I16x16, x + 32), (c.load(I8x32, x) & 1).equals(0).bits(I32),
    ],
    "halves": lambda c, x: [
        c.load(F16x8, x + 64).to(F32x8), c.load(I16x8, x).to(I32x8), c.load(I16x16, x) << 8, c.load(I16x16, x).sar(8),
        c.load(I16x16, x) - 32, c.load(I16x16, x).bits(I8x32), c.load(F16, x + 64).to(F32),
        c.load(I16x8, x + 64).bits(F16x8).to(F32x8),
        c.load(Type("i16", 16), x + 64).bits(Type("f16", 16)).to(Type("f32", 16)),
        c.load(F32x8, x).to(F16x8),
    ],
    "comparisons": lambda c, x: [
        c.select(c.load(F32x8, x) > c.load(F32x8, x + 32), c.load(F32x8, x), c.load(F32x8, x + 32)),
        c.max(c.load(F32x8, x), 1.0), c.min(c.load(I32x8, x), c.load(I32x8, x + 32)),
        c.select(c.load(I64, x) < c.load(I64, x + 8), c.load(F32x8, x), c.load(F32x8, x + 32)),
        (c.load(I16._replace(lanes=32), x) > 5).bits(I32), (c.load(F32x8, x) > 0.0).bits(Type("i8")),
        c.load(I32x8, x).differs(c.load(I32x8, x + 4)).bits(Type("i8")),
    ],
    "functions": lambda c, x: [
        c.fma(c.load(F32x8, x), c.load(F32x8, x + 32), c.load(F32x8, x + 64)), c.sqrt(c.abs(c.load(F32x8, x))),
        c.round(c.load(F32x8, x) * 7.3), c.floor(c.load(F32x8, x) * 7.3), c.count_ones(c.load(I64, x)),
        c.lowest_one(c.load(I64, x)), c.highest_one(c.load(I64, x)),
        c.fma(c.load(F32, x).to(F64), c.load(F32, x + 4).to(F64), c.load(F32, x + 8).to(F64)),
        c.load(F32x8, x).to(F64._replace(lanes=8)), (c.load(F32x8, x) * 100.0).to(I32x8),
    ],
    "shuffles": lambda c, x: [
        c.shuffle(c.load(F32x8, x), None, (3, 1, 4, 1, 5, 2, 6, 5)),
        c.shuffle(c.load(F32x8, x), c.load(F32x8, x + 32), (0, 8, 1, 9, 4, 12, 5, 13)),
        c.shuffle(c.load(I8x32, x), None, [4 * (i // 4) + 2 for i in range(32)]),
        c.concat(c.load(F32x8, x), c.load(F32x8, x + 32)), c.sum_lanes(c.load(F32x8, x)).splat(8),
        c.max_lanes(c.load(F32x8, x)).splat(8), c.load(F32x8, x).lane(5), c.load(I8x32, x).lane(13),
        c.shuffle(c.load(I32x4, x), c.load(I32x4, x + 16), (0, 4, 1, 5, 2, 6, 3, 7)),
        c.shuffle(c.load(F32x8, x), None, (1, 0)).lane(0), c.load(I32x4, x).lane(3),
        c.shuffle(c.load(Type("f32", 16), x), None, range(8, 16)),
    ],
    "transposes": lambda c, x: [
        *c.transpose8([c.load(F32x8, x + 4 * r) for r in range(8)]),
        *c.transpose8x4([c.load(I32x4, x + 12 * r) for r in range(8)]),
        c.sum_lanes8([c.load(F32x8, x + 4 * r) for r in range(8)]),
        *c.transpose8([c.load(F32x8, x + 4 * r) for r in range(16)]),
    ],
    "constants": lambda c, x: [
        c.const(I32x8, [7, 1, 9, 3, 0, 5, 15, 2]), c.const(F32x8, [0.5 * i for i in range(8)]),
        c.const(I8x32, list(range(32))), c.const(I8x32, -3), c.const(I16x16, 1), c.const(I32x8, [-i for i in range(8)]),
    ],
    "memory": lambda c, x: [
        c.gather(I32, [x + 4 * (7 - i) for i in range(8)]),
        c.gather(I16, [x + 6 * i for i in range(8)]).as_lanes("f16").to(F32x8),
        c.gather(I8, [x + 5 * i for i in range(8)]).zext(I32x8), c.splat_load(F32x8, x + 12),
        c.vector([c.load(F32, x + 4 * i) for i in (5, 1, 3, 0, 2, 2, 7, 6)]),
        c.load(I8, c.table("primes", bytes([2, 3, 5, 7])) + 2),
        c.gather(F32, [x + 4 * (i * 3 % 16) for i in range(16)]),
    ],
    "parts": lambda c, x: [
        c.load(Type("i64", 8), x).bits(Type("i32", 16)), c.load(Type("i32", 16), x).bits(Type("i64", 8)) * 3,
        c.select((c.load(I8x32, x) & -128).equals(0), c.load(I8x32, x), c.load(I8x32, x + 32)),
        c.load(I8x32, x) - c.load(I8x32, x + 32), c.load(I16x16, x) - c.load(I16x16, x + 32),
        c.load(I32x4, x).bits(Type("i8", 16)), c.load(Type("i16", 4), x).bits(I8x8), c.load(I32x4, x) * 3,
        c.load(Type("f64", 8), x).bits(Type("i8", 64)), c.load(I8x8, x).bits(Type("i32", 2)) + 1,
    ],
}  # fmt: skip


def _kernel(name: str) -> Kernel:
    def trace(c: Code, a: SimpleNamespace, work: Work) -> None:
        with c.shares(work, c.i64(5), c.i64(1)) as item:
            at = a.y + item * 4096
            for value in PROBES[name](c, a.x + item * 8):
                c.store(at, value)
                at = at + 64

    return Kernel(f"probe_{name}", ("x", "y"), trace)


@pytest.fixture(scope="module")
def jit() -> Jit:
    return Jit()


@pytest.mark.parametrize("name", PROBES)
def test_an_operation_has_the_bits_of_the_cpu(jit: Jit, name: str) -> None:
    rng = np.random.default_rng(len(name))
    x = rng.standard_normal(64).astype(np.float32)
    x[16:] = np.frombuffer(rng.standard_normal(96).astype(np.float16).tobytes(), np.float32)
    expected, found = np.zeros((5, 4096), np.uint8), np.zeros((5, 4096), np.uint8)
    kernel = _kernel(name)
    on_cpu(jit, kernel, {"x": x, "y": expected}, {})
    emulated(kernel, {"x": x.copy(), "y": found}, {})
    for number in range(64):
        part = slice(64 * number, 64 * number + 64)
        assert found[:, part].tobytes() == expected[:, part].tobytes(), f"result {number} of {name}"


def _sums(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Running sums through scratch memory and a loop that is left early."""
    scratch = c.scratch(256)
    with c.shares(work, c.i64(9), c.i64(1)) as item:
        total = c.var(c.i64(0))
        with c.loop() as loop:
            total.value = total.value + 3
            c.leave(loop, total.value > item * 5)
        with c.range(0, 4) as i:
            c.store(scratch + i * 32, c.load(F32x8, a.x + i * 32) * total.value.to(F32).splat(8))
        back = c.var(c.f32(0.0))
        with c.range(0, 32) as i, c.when((i + item) % 3 > 0):
            back.value = back.value * 0.5 + c.load(F32, scratch + i * 4)
        c.store(a.y + item * 4, back.value)


def test_groups_exchange_data_through_memory_and_take_their_own_branches(jit: Jit) -> None:
    kernel = Kernel("sums", ("x", "y"), _sums)
    x = np.random.default_rng(3).standard_normal(32).astype(np.float32)
    expected, found = np.zeros(9, np.float32), np.zeros(9, np.float32)
    on_cpu(jit, kernel, {"x": x, "y": expected}, {})
    emulated(kernel, {"x": x.copy(), "y": found}, {})
    assert expected.any()
    assert found.tobytes() == expected.tobytes()


def _in_place(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Rows are overwritten by parts of themselves, in a loop and between loops that may be empty."""
    scratch = c.scratch(128)
    with c.shares(work, c.i64(37), c.i64(1)) as item:
        row = a.y + item * 128
        c.store(row, c.load(F32x8, row + 4) + 1.0)
        c.store(scratch, c.load(F32x8, row + 8))
        c.store(scratch + 32, c.load(F32x8, row + 16))
        total = c.var(c.const(F32x8, 0.0))
        with c.range(0, item % 3) as i:
            total.value = total.value + c.load(F32x8, scratch + i * 4)
        c.store(row + 32, c.load(F32x8, scratch + 4) + total.value)
        total.value = c.load(F32x8, row)
        with c.range(0, 3):
            c.store(row + 64, c.load(F32x8, row + 68) * 0.5 + total.value)


def test_groups_wait_before_they_overwrite_what_they_read(jit: Jit) -> None:
    kernel = Kernel("in_place", ("y",), _in_place)
    y = np.random.default_rng(3).standard_normal((37, 32)).astype(np.float32)
    expected, found = y.copy(), y.copy()
    on_cpu(jit, kernel, {"y": expected}, {})
    emulated(kernel, {"y": found}, {})
    assert found.tobytes() == expected.tobytes() != y.tobytes()
