"""Graphs that mean harm: refused or run, but never outside their buffers, nor for hours."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from running import EACH_LOWERING, can_run, new, values

from llamado.devices.compile import checks
from llamado.devices.compile.compiler import Compiler
from llamado.devices.cpu.device import CpuDevice, cpu_target
from llamado.devices.device import DeviceError
from llamado.ggml import Graph, RopeMode, Tensor
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T


@pytest.mark.slow
@pytest.mark.parametrize("types", ["few", pytest.param("all", marks=pytest.mark.full)])
@pytest.mark.parametrize("lowering", EACH_LOWERING)
def test_random_graphs_stay_within_their_buffers(lowering: str, types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: a kernel that goes astray ends it."""
    if not can_run(lowering):
        pytest.skip(f"this machine has no {lowering}")
    monkeypatch.setenv("LLAMADO_SIMD", lowering)
    script, count = Path(__file__).with_name("hostile.py"), "400" if types == "few" else "2500"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", script, "1", count, types], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ran" in done.stdout and "refused" in done.stdout


def bound(device: CpuDevice, *ne: int, type: T = T.F32) -> Tensor:
    tensor = new(*ne, type=type)
    tensor.buffer = device.alloc(tensor.nbytes)
    return tensor


def refuse(device: CpuDevice, graph: Graph, words: str) -> None:
    with pytest.raises(DeviceError, match=words):
        device.prepare(graph)


def one(node: Tensor) -> Graph:
    graph = Graph()
    graph.expand(node)
    return graph


def test_endless_work_is_rejected(best: CpuDevice) -> None:
    """Strides of zero make any number of elements out of a few bytes."""
    x = bound(best, 64)
    x.ne, x.nb = (64, 1 << 20, 1 << 20, 1 << 20), (4, 0, 0, 0)
    refuse(best, one(g.sum_rows(x)), "multiplications")
    total = g.sum_all(x)
    refuse(best, one(total), "multiplications")
    y = bound(best, 64, 64)
    repeated = g.silu(y)
    repeated.ne, repeated.nb, repeated.buffer = (64, 64, 1 << 10, 1), (4, 256, 0, 0), y.buffer
    y.ne, y.nb = repeated.ne, repeated.nb
    refuse(best, one(repeated), "overwrite itself")
    w = bound(best, 64, 64)
    product = g.mul_mat(w, w)
    w.ne, w.nb, product.ne = (1 << 20, 1 << 20, 1, 1), (4, 0, 0, 0), (1 << 20, 1 << 20, 1, 1)
    refuse(best, one(product), "multiplications")
    long = Graph()
    for _ in range(checks.MAX_NODES + 1):
        long.nodes.append(g.silu(x))
    refuse(best, long, "operations; at most")


def test_oversized_memory_is_rejected(best: CpuDevice) -> None:
    x = bound(best, 64)
    x.ne, x.nb = (64, 1 << 16, 1 << 15, 1), (4, 0, 0, 0)
    refuse(best, one(g.silu(x)), "working memory")


@pytest.mark.slow
def test_long_chains_are_limited(best: CpuDevice) -> None:
    """Every chain is a kernel to compile."""
    x = bound(best, 16, 2)
    y = x
    for i in range(200):
        y = g.silu(y) if i % 3 else g.scale(y, 0.5)
    graph = one(y)
    operations = Compiler(graph, cpu_target(best.jit.lowering, 2)).compile()
    assert 200 / 24 <= len(operations) <= 200 / 4
    best.write(x, values(16, 2))
    best.submit(graph)


def test_views_in_a_circle_and_diamonds_of_views_end(best: CpuDevice) -> None:
    x = bound(best, 16, 2)
    a, b = g.view_2d(x, 16, 2, 64), g.view_2d(x, 16, 2, 64)
    a.view_src, b.view_src = b, a
    refuse(best, one(g.silu(a)), "circle")
    y = g.silu(x)
    view = y
    for _ in range(60):
        view = g.reshape(view, 16, 2)
        view.src = (view.src[0],) * 10
    best.submit(one(g.silu(view)))


def test_blocks_of_a_single_row_are_whole(best: CpuDevice) -> None:
    """A row of one block may claim to be no bytes long."""
    w = bound(best, 32, 8, type=T.Q8_0)
    w.nb = (0, 34, 272, 272)
    w.offset = 1
    refuse(best, one(g.get_rows(w, bound(best, 1, type=T.I32))), "ends at byte")


def test_nan_and_infinity(best: CpuDevice) -> None:
    """Parameters of rotations that make no sense are refused or do no harm."""
    x, positions = bound(best, 16, 1, 4), bound(best, 4, type=T.I32)
    for numbers in ((0.0, 1.0, 1.0, 1.0, 32.0, 1.0), (-5.0, float("nan"), 1.0, float("inf"), 0.0, 0.0),
                    (1e30, 1e38, 1.0, 1e38, 32.0, 1.0)):  # fmt: skip
        node = g.rope_ext(x, positions, None, 16, RopeMode.NEOX, 0, *numbers)
        node.op_params = struct.pack("<5i6f5i", 0, 16, 2, 0, -1, *numbers, 0, 0, 0, 0, 0)
        try:
            best.submit(one(node))
        except DeviceError as error:
            assert "ROPE" in str(error)
