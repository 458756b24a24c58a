"""Convolutions of grids of hidden states, without an operation for them: rows of a grid are gathered and multiplied.

A grid is a matrix with one row for each place, row by row; several grids may follow each other. The host lists the
places that each result reads (`taps`), and one more row of zeros is the padding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import (
    add,
    concat,
    cont,
    fill,
    get_rows,
    mul_mat,
    pad,
    permute,
    reshape,
    ssm_conv,
    view_2d,
    view_3d,
)
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.rows import as_f32
from llamado.models.weights import Weights


class Kernel(NamedTuple):
    """Geometry of a convolution: the size of its square kernel, its stride, and the padding before and after."""

    size: int
    stride: int = 1
    before: int = 0
    after: int = 0

    @classmethod
    def same(cls, size: int, stride: int, n: int) -> Kernel:
        """Return the kernel whose result has ⌈n / stride⌉ places a side, with more padding after than before."""
        total = max(0, (-(-n // stride) - 1) * stride + size - n)
        return cls(size, stride, total // 2, total - total // 2)

    def n_out(self, n: int) -> int:
        """Return the places of a side of the result for `n` of the input."""
        return (n + self.before + self.after - self.size) // self.stride + 1

    def taps(self, nx: int, ny: int, n_grids: int = 1) -> NDArray[np.int32]:
        """Return the row that each place of the result reads for each weight: int32 [n_out, size²].

        Padding reads row nx · ny · n_grids.
        """
        x, y = (np.arange(self.n_out(n))[:, None] * self.stride + np.arange(self.size) - self.before for n in (nx, ny))
        inside = ((y >= 0) & (y < ny))[:, None, :, None] & ((x >= 0) & (x < nx))[None, :, None, :]
        places = y[:, None, :, None] * nx + x[None, :, None, :]
        grids = np.arange(n_grids)[:, None, None, None, None] * (nx * ny)
        rows = np.where(inside, grids + places, nx * ny * n_grids)
        return rows.reshape(-1, self.size**2).astype(np.int32)


class Convolution(NamedTuple):
    """A convolution: a weight [size, size, n_in, n_out], and a bias if the file has one."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def take(cls, weights: Weights, name: str, size: int, n_in: int) -> Convolution:
        """Take `name.weight`, whose number of outputs is that in the file. Raises InvalidModel."""
        n_out = weights.ne(f"{name}.weight")[3]
        weight = weights.shared.require(f"{name}.weight", size, size, n_in, n_out)
        return cls(weight, weights.shared.optional(f"{name}.bias", n_out))

    @property
    def size(self) -> int:
        """Side of the kernel."""
        return self.weight.ne[0]

    @property
    def n_out(self) -> int:
        """Width of the result."""
        return self.weight.ne[3]

    def __call__(self, step: EncoderPass, x: Tensor, taps: str, n: int, name: str) -> Tensor:
        """Return F32 [n_out, n]. `taps` is the name of the input with Kernel.taps; a kernel of size 1 reads none."""
        n_taps, n_in, n_out = self.size**2, *self.weight.ne[2:]
        weight = reshape(self.weight, n_taps, n_in, n_out)
        if n_taps > 1:
            x = reshape(gather(x, step.input(taps, n_taps * n, type=TensorType.I32)), n_in, n_taps, n)
            # Places and channels are in another order in the weights: the smaller of the two is rearranged.
            if n_out <= n:
                weight = cont(permute(weight, 1, 0, 2, 3))
            else:
                x = cont(permute(x, 1, 0, 2, 3))
        y = mul_mat(reshape(weight, n_taps * n_in, n_out), reshape(x, n_taps * n_in, n), name=name)
        return y if self.bias is None else add(y, self.bias, name)


class DepthwiseConvolution(NamedTuple):
    """A convolution of each channel for itself: a weight [size, size, 1, n], and a bias if the file has one."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def take(cls, weights: Weights, name: str, n: int) -> DepthwiseConvolution:
        """Take `name.weight`, whose size is that in the file. Raises InvalidModel."""
        size = weights.ne(f"{name}.weight")[0]
        w = weights.shared
        return cls(w.require(f"{name}.weight", size, size, 1, n), w.optional(f"{name}.bias", n))

    @property
    def size(self) -> int:
        """Side of the kernel."""
        return self.weight.ne[0]

    def __call__(self, x: Tensor, nx: int, ny: int, kernel: Kernel, name: str) -> Tensor:
        """Return F32 [n, places of the result] for a grid of `nx` × `ny` places.

        Each row of the kernel is a convolution in one dimension, for which there is an operation. It computes the
        columns that a stride skips, too.
        """
        n, size, stride = x.ne[0], self.size, kernel.stride
        out_x, out_y = kernel.n_out(nx), kernel.n_out(ny)
        margins = kernel.before, kernel.after
        padded = pad(cont(permute(reshape(x, n, nx, ny), 1, 0, 2, 3)), margins, (0, 0), margins)
        weight = as_f32(self.weight)
        y: Tensor | None = None
        for i in range(size):
            rows = view_3d(padded, padded.ne[0], n, out_y, padded.nb[1], stride * padded.nb[2], i * padded.nb[2])
            part = ssm_conv(rows, view_2d(weight, size, n, weight.nb[3], i * weight.nb[1]), f"{name}-{i}")
            y = part if y is None else add(y, part)
        assert y is not None
        if stride > 1:
            y = cont(view_3d(y, n, out_x, out_y, stride * y.nb[1], y.nb[2]))
        y = reshape(y, n, out_x * out_y)
        return y if self.bias is None else add(y, self.bias, name)


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows of x, behind which there is one of zeros: F32 [ne0, number of rows]."""
    zeros = fill(view_2d(x, x.ne[0], 1, x.nb[1]), 0.0)
    return get_rows(concat(x, zeros, 1), rows)
