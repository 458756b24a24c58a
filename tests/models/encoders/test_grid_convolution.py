"""Convolutions of grids, compared with sums over windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from projectors.graphs import run

from llamado.gguf.types import TensorType
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.grid_convolution import Convolution, DepthwiseConvolution, Kernel

KERNELS = [
    Kernel(3, 2, 1, 1),
    Kernel(3, 1, 1, 1),
    Kernel(2, 2),
    Kernel(3, 2, 0, 1),
    Kernel(5, 1, 2, 2),
    Kernel(7, 1, 3, 3),
]


def windows(grid: NDArray[Any], kernel: Kernel) -> NDArray[Any]:
    """Return the windows of a grid [ny, nx, n] that the kernel sees: [places, size, size, n]."""
    margins = (kernel.before, kernel.after)
    padded = np.pad(grid, (margins, margins, (0, 0)))
    found = np.lib.stride_tricks.sliding_window_view(padded, (kernel.size, kernel.size), (0, 1))
    strided = found[:: kernel.stride, :: kernel.stride]  # [ny, nx, n, size, size]
    return strided.transpose(0, 1, 3, 4, 2).reshape(-1, kernel.size, kernel.size, grid.shape[2])


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("n_out", [3, 90])  # the weights or the windows are rearranged
def test_a_convolution_sums_over_windows(kernel: Kernel, n_out: int) -> None:
    rng = np.random.default_rng(kernel.size)
    grids = rng.standard_normal((2, 7, 9, 5)).astype(np.float32)
    weight = rng.standard_normal((n_out, 5, kernel.size, kernel.size)).astype(np.float32)
    bias = rng.standard_normal(n_out).astype(np.float32)
    step = EncoderPass(1e-5)
    x, w, b = step.input("x", 5, 2 * 7 * 9), step.input("w", kernel.size, kernel.size, 5, n_out), step.input("b", n_out)
    taps = kernel.taps(9, 7, 2)
    y = Convolution(w, b)(step, x, "taps", len(taps), "y")
    expected = np.concatenate([np.einsum("pyxc,ocyx->po", windows(grid, kernel), weight) for grid in grids]) + bias
    assert len(taps) == len(expected) == 2 * kernel.n_out(9) * kernel.n_out(7)
    found = run(step, y, {"x": grids, "w": weight, "b": bias, "taps": taps})
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_a_convolution_of_size_1_needs_no_windows() -> None:
    rng = np.random.default_rng(0)
    rows, weight = rng.standard_normal((12, 4)).astype(np.float32), rng.standard_normal((3, 4)).astype(np.float32)
    step = EncoderPass(1e-5)
    y = Convolution(step.input("w", 1, 1, 4, 3), None)(step, step.input("x", 4, 12), "", 12, "y")
    np.testing.assert_allclose(run(step, y, {"x": rows, "w": weight}), rows @ weight.T, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("type", [TensorType.F32, TensorType.F16])
def test_a_depthwise_convolution_sums_each_channel(kernel: Kernel, type: TensorType) -> None:
    rng = np.random.default_rng(kernel.size)
    grid = rng.standard_normal((7, 9, 12)).astype(np.float32)
    kind = np.float32 if type is TensorType.F32 else np.float16
    weight = rng.standard_normal((12, kernel.size, kernel.size)).astype(kind)
    bias = rng.standard_normal(12).astype(np.float32)
    step = EncoderPass(1e-5)
    w = step.input("w", kernel.size, kernel.size, 1, 12, type=type)
    y = DepthwiseConvolution(w, step.input("b", 12))(step.input("x", 12, 63), 9, 7, kernel, "y")
    expected = np.einsum("pyxc,cyx->pc", windows(grid, kernel), weight.astype(np.float32)) + bias
    np.testing.assert_allclose(run(step, y, {"x": grid, "w": weight, "b": bias}), expected, atol=2e-5)


@pytest.mark.parametrize(("size", "stride", "n"), [(3, 2, 8), (3, 2, 9), (5, 2, 6), (3, 1, 4), (2, 2, 6), (1, 2, 5)])
def test_same_padding_keeps_every_stride_th_place(size: int, stride: int, n: int) -> None:
    kernel = Kernel.same(size, stride, n)
    assert kernel.n_out(n) == -(-n // stride)
    assert 0 <= kernel.after - kernel.before <= 1
