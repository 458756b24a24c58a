"""Convolutions of sound encoders, as products of matrices with rows that overlap.

One-dimensional ones see [n_channels, n_frames], two-dimensional ones [n_channels, n_bands, n_frames, n_pieces].
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from llamado.ggml.graph import (
    add,
    cont,
    mul,
    mul_mat,
    pad,
    permute,
    reshape,
    transpose,
    unary,
    view_1d,
    view_2d,
    view_4d,
)
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.rows import as_f32
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.forward import Linear
from llamado.models.weights import RoleWeights

PATCHES = "patches"
"""Name of the input of FirstConv2d."""


class Axis(Enum):
    """The axis of a spectrogram that is the first of a kernel's weight."""

    TIME = "time"
    BAND = "band"


class Conv1d(NamedTuple):
    """Convolution of 3 frames, with a frame of zeros at each end.

    `weight`: [3, n_in, n_out].
    """

    weight: Tensor
    bias: Tensor
    stride: int

    @classmethod
    def take(cls, w: RoleWeights, name: str, n_in: int, n_out: int, *, stride: int = 1) -> Conv1d:
        """Take weight and bias. Raises InvalidModel or UnsupportedModel."""
        return cls(plain(w.require(f"{name}.weight", 3, n_in, n_out)), bias_of(w, name, n_out), stride)

    def __call__(self, step: EncoderPass, x: Tensor, name: str) -> Tensor:
        """Return F32 [n_out, n_frames / stride]."""
        n_in, n_frames = x.ne[:2]
        n_out = halved(n_frames, self.stride)
        padded = pad(x, (0, 0), (1, 1))
        # Frame t with its neighbors is one row of 3 · n_in numbers.
        rows = view_2d(padded, 3 * n_in, n_out, self.stride * padded.nb[1])
        weight = reshape(cont(permute(self.weight, 1, 0, 2, 3)), 3 * n_in, self.weight.ne[2])
        return add(mul_mat(weight, rows, name=name), flat(self.bias), name)


class FirstConv2d(NamedTuple):
    """Convolution of the spectrogram in squares of 3 × 3 with a stride of 2. The host lays the squares out (`patches`).

    `weight`: [3, 3, 1, n_out].
    """

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def take(cls, w: RoleWeights, name: str) -> FirstConv2d:
        """Take the weight, and the bias if there is one. Raises InvalidModel."""
        n_out = w.ne(f"{name}.weight")[3]
        return cls(w.require(f"{name}.weight", 3, 3, 1, n_out), optional_bias(w, name, n_out))

    def __call__(self, step: EncoderPass, n_bands: int, n_frames: int, n_pieces: int = 1) -> Tensor:
        """Return F32 [n_out, n_bands / 2, n_frames / 2, n_pieces] for pieces of `n_frames`."""
        n_out, n_bands, n_frames = self.weight.ne[3], halved(n_bands), halved(n_frames)
        x = step.input(PATCHES, 9, n_bands * n_frames * n_pieces)
        x = mul_mat(reshape(self.weight, 9, n_out), x, name="conv2d_first")
        if self.bias is not None:
            x = add(x, flat(self.bias))
        return reshape(x, n_out, n_bands, n_frames, n_pieces)


def patches(frames: NDArray[np.float32], first: Axis, n_piece: int = 0) -> NDArray[np.float32]:
    """Return the squares that FirstConv2d sees of float32 [n_frames, n_bands], in pieces of `n_piece` frames if given:
    float32 [n, 9].
    """
    pieces = frames.reshape(-1, n_piece or len(frames), frames.shape[1])
    squares = sliding_window_view(np.pad(pieces, ((0, 0), (1, 1), (1, 1))), (3, 3), axis=(1, 2))[:, ::2, ::2]
    return np.ascontiguousarray(squares if first is Axis.BAND else squares.swapaxes(3, 4)).reshape(-1, 9)


class Conv2d(NamedTuple):
    """Convolution in squares of 3 × 3 with a stride of 2, with zeros around each piece.

    `weight`: [3, 3, n_in, n_out].
    """

    weight: Tensor
    bias: Tensor | None
    first: Axis

    @classmethod
    def take(cls, w: RoleWeights, name: str, n_in: int, first: Axis) -> Conv2d:
        """Take the weight, and the bias if there is one. Raises InvalidModel or UnsupportedModel."""
        n_out = w.ne(f"{name}.weight")[3]
        return cls(plain(w.require(f"{name}.weight", 3, 3, n_in, n_out)), optional_bias(w, name, n_out), first)

    @property
    def n_out(self) -> int:
        """Channels of the result."""
        return self.weight.ne[3]

    def __call__(self, step: EncoderPass, x: Tensor, name: str) -> Tensor:
        """Return F32 [n_out, n_bands / 2, n_frames / 2, n_pieces]."""
        n_in, n_bands, n_frames, n_pieces = x.ne
        x = pad(x, (0, 0), (1, 1), (1, 1))
        axes = (3, 1, 0, 2) if self.first is Axis.TIME else (1, 3, 0, 2)
        weight = cont(permute(self.weight, *axes))  # [n_in, band, n_out, frame]
        found = None
        for frame in range(3):
            # Three neighboring bands of a frame are one row of 3 · n_in numbers.
            rows = view_4d(
                x, 3 * n_in, halved(n_bands), halved(n_frames), n_pieces, 2 * x.nb[1], 2 * x.nb[2], x.nb[3],
                frame * x.nb[2],
            )  # fmt: skip
            kernel = view_2d(weight, 3 * n_in, self.n_out, weight.nb[2], frame * weight.nb[3])
            product = mul_mat(kernel, rows, name=name)
            found = product if found is None else add(found, product)
        assert found is not None
        return found if self.bias is None else add(found, flat(self.bias), name)


class ConvStem(NamedTuple):
    """Three convolutions that leave an eighth of frames and bands, each with GELU, and a matrix."""

    first: FirstConv2d
    second: Conv2d
    third: Conv2d
    out: Linear

    @classmethod
    def take(cls, w: RoleWeights, n_bands: int, n_embd: int) -> ConvStem:
        """Take the weights `a.conv2d.N` and `a.conv_out`. Raises InvalidModel or UnsupportedModel."""
        first = FirstConv2d.take(w, "a.conv2d.1")
        second = Conv2d.take(w, "a.conv2d.2", first.weight.ne[3], Axis.TIME)
        third = Conv2d.take(w, "a.conv2d.3", second.n_out, Axis.TIME)
        return cls(first, second, third, w.linear("a.conv_out", third.n_out * eighth(n_bands), n_embd))

    def __call__(self, step: EncoderPass, n_bands: int, n_frames: int, n_pieces: int = 1) -> Tensor:
        """Return F32 [n_embd, n_frames / 8 · n_pieces] for pieces of `n_frames`."""
        x = unary(self.first(step, n_bands, n_frames, n_pieces), UnaryOp.GELU_ERF)
        for i, conv in enumerate((self.second, self.third), 2):
            x = unary(conv(step, x, f"conv2d{i}"), UnaryOp.GELU_ERF)
        # Rows of the matrix go through the bands first.
        x = reshape(cont(permute(x, 1, 0, 2, 3)), x.ne[0] * x.ne[1], x.ne[2] * x.ne[3])
        return self.out(step, x, "conv_out")


class DepthwiseConv2d(NamedTuple):
    """Convolution of each channel by itself in squares of 3 × 3, with a stride of 2 and zeros around.

    `weight`: [3, 3, 1, n], bands first.
    """

    weight: Tensor
    bias: Tensor

    @classmethod
    def take(cls, w: RoleWeights, name: str, n: int) -> DepthwiseConv2d:
        """Take weight and bias. Raises InvalidModel or UnsupportedModel."""
        return cls(plain(w.require(f"{name}.weight", 3, 3, 1, n)), bias_of(w, name, n))

    def __call__(self, step: EncoderPass, x: Tensor, name: str) -> Tensor:
        """Return F32 [n, n_bands / 2, n_frames / 2, 1]."""
        n, n_bands, n_frames, _ = x.ne
        x = pad(x, (0, 0), (1, 1), (1, 1))
        kernels = as_f32(cont(transpose(reshape(self.weight, 9, n))))
        found = None
        for i in range(9):
            frame, band = divmod(i, 3)
            at = frame * x.nb[2] + band * x.nb[1]
            part = view_4d(x, n, halved(n_bands), halved(n_frames), 1, 2 * x.nb[1], 2 * x.nb[2], x.nb[3], at)
            product = mul(part, view_1d(kernels, n, i * kernels.nb[1]))
            found = product if found is None else add(found, product)
        assert found is not None
        return add(found, flat(self.bias), name)


def halved(n: int, stride: int = 2) -> int:
    """Return how many outputs a convolution of 3 with zeros at both ends has."""
    return (n - 1) // stride + 1


def eighth(n: int) -> int:
    """Return how many outputs three convolutions with a stride of 2 have."""
    return halved(halved(halved(n)))


def plain(weight: Tensor) -> Tensor:
    """Return the weight of a convolution. Raises UnsupportedModel if it is quantized: it cannot be transposed."""
    if weight.type.block_size > 1:
        raise UnsupportedModel(f"'{weight.name}' is {weight.type.name}; F32, F16 or BF16 is expected")
    return weight


def flat(x: Tensor) -> Tensor:
    """Return all elements as one row."""
    return x if x.ne[0] == x.nelements else reshape(x, x.nelements)


def bias_of(w: RoleWeights, name: str, n: int) -> Tensor:
    """Take a convolution's bias of `n` numbers, in any dimension. Raises InvalidModel."""
    ne = w.ne(f"{name}.bias")
    if ne[0] * ne[1] * ne[2] * ne[3] != n:
        raise InvalidModel(f"tensor '{name}.bias' has shape {list(ne)}; {n} numbers are expected")
    return w.require(f"{name}.bias", *ne)


def optional_bias(w: RoleWeights, name: str, n: int) -> Tensor | None:
    """Take a convolution's bias, if there is one. Raises InvalidModel."""
    return bias_of(w, name, n) if w.has(f"{name}.bias") else None
