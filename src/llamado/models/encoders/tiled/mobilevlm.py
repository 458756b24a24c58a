"""MobileVLM (arXiv 2312.16886) and its second version (arXiv 2402.03766): CLIP, and convolutions over its patches."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import add, cont, gelu, mean, mul, relu, reshape, transpose, unary
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.media.patches import merged_order
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.grid_convolution import DepthwiseConvolution, Kernel
from llamado.models.encoders.parts.rows import mean_of_groups
from llamado.models.encoders.parts.transformer import NormKind, take_norm
from llamado.models.encoders.tiled.llava import ClipEncoder
from llamado.models.errors import UnsupportedModel
from llamado.models.forward import Linear
from llamado.models.parts.norms import LayerNorm, RmsNorm
from llamado.models.weights import Weights

SIDE = 24
"""Patches of a side, as in llama.cpp, which supports no other number."""
PART = "mm.model"


class MobileEncoder(ClipEncoder):
    """A picture of 24 × 24 patches becomes 12 × 12 tokens."""

    merge = 2
    layers: ClassVar[tuple[int, int]]
    """Numbers of the two matrices in front of the convolutions."""

    def _take_projector(self, weights: Weights) -> None:
        super()._take_projector(weights)
        if self.side != SIDE:
            raise UnsupportedModel(f"'{self.keys.projector}' with {self.side} patches a side; {SIDE} are supported")
        w, (first, second) = weights.shared, self.layers
        n = weights.ne(f"{PART}.mlp.{first}.weight")[1]
        self.n_embd = weights.ne(f"{PART}.mlp.{second}.weight")[1]
        self._first = w.linear(f"{PART}.mlp.{first}", self.n_features, n)
        self._second = w.linear(f"{PART}.mlp.{second}", n, self.n_embd)

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        return self._second(step, gelu(self._first(step, x, "projection_1")), "projection_2")


class MobileBlock(NamedTuple):
    """Convolution of each channel, channel attention (squeeze and excitation), and a matrix, with norms."""

    convolution: DepthwiseConvolution
    norm: LayerNorm | RmsNorm
    squeeze: Linear
    excite: Linear
    matrix: Tensor
    last_norm: LayerNorm | RmsNorm

    @classmethod
    def take(cls, weights: Weights, number: int, n: int) -> MobileBlock:
        """Take a block for `n` channels. Raises InvalidModel."""
        w, name = weights.shared, f"{PART}.mb_block.{number}.block"
        n_hidden = weights.ne(f"{name}.1.fc1.weight")[1]
        return cls(
            convolution=DepthwiseConvolution(w.require(f"{name}.0.0.weight", 3, 3, 1, n), None),
            norm=take_norm(w, f"{name}.0.1", n, NormKind.LAYER),
            squeeze=w.linear(f"{name}.1.fc1", n, n_hidden),
            excite=w.linear(f"{name}.1.fc2", n_hidden, n),
            matrix=w.require(f"{name}.2.0.weight", n, n),
            last_norm=take_norm(w, f"{name}.2.1", n, NormKind.LAYER),
        )

    def __call__(self, step: EncoderPass, x: Tensor, stride: int, name: str) -> Tensor:
        x = self.convolution(x, SIDE, SIDE, Kernel(3, stride, 1, 1), f"{name}_conv")
        x = self.norm(step, x, f"{name}_norm")
        x = unary(x, UnaryOp.HARDSWISH)
        means = reshape(mean(cont(transpose(x))), x.ne[0], 1)
        squeezed = relu(self.squeeze(step, means, f"{name}_squeeze"))
        x = mul(x, unary(self.excite(step, squeezed, f"{name}_excite"), UnaryOp.HARDSIGMOID))
        return self.last_norm(step, step.mul_mat(self.matrix, x, f"{name}_matrix"), f"{name}_last_norm")


class LdpEncoder(MobileEncoder):
    """Two blocks of convolutions, of which the second halves the sides."""

    layers = (1, 3)

    def _take_projector(self, weights: Weights) -> None:
        super()._take_projector(weights)
        self._blocks = [MobileBlock.take(weights, number, self.n_embd) for number in (1, 2)]

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = super().project(step, x)
        first, second = self._blocks
        x = add(x, first(step, x, 1, "block_1"))
        return second(step, x, self.merge, "block_2")


class LdpV2Encoder(MobileEncoder):
    """Means of squares of patches, and a convolution of each channel added to them."""

    layers = (0, 2)

    def _take_projector(self, weights: Weights) -> None:
        super()._take_projector(weights)
        w, name, n = weights.shared, f"{PART}.peg.0", self.n_embd
        self._peg = DepthwiseConvolution(w.require(f"{name}.weight", 3, 3, 1, n), w.require(f"{name}.bias", n))

    def tokens(self) -> NDArray[np.int32]:
        return merged_order(SIDE, SIDE, self.merge)

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = mean_of_groups(super().project(step, x), self.merge**2)
        side = SIDE // self.merge
        return add(self._peg(x, side, side, Kernel(3, 1, 1, 1), "peg"), x)
