"""ConvNeXt V2 (arXiv 2301.00808), the encoder of Reka Edge (clip.cpp, models/yasa2.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import (
    Graph,
    add,
    clamp,
    cont,
    div,
    get_rows,
    mean,
    mul,
    reshape,
    sqr,
    sqrt,
    sub,
    sum_rows,
    transpose,
    unary,
)
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput, MediaChunk, Piece
from llamado.media.media import Media
from llamado.media.patches import merged_order, patches
from llamado.media.preprocessing import ImageOptions, fixed_size
from llamado.media.resize import STRETCHED
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass, MediaEncoder
from llamado.models.encoders.parts.grid_convolution import Convolution, DepthwiseConvolution, Kernel
from llamado.models.encoders.parts.patches import PATCHES, PatchEmbedding
from llamado.models.encoders.parts.projection import Projection
from llamado.models.encoders.parts.rows import mean_of_groups
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear
from llamado.models.weights import RoleWeights, Weights

_POOLED = 8
"""Rows and columns of the result."""
_HALVING = Kernel(2, stride=2)
_LEAST_SUM = 1e-6
_MOST = 1e30


class ChannelNorm(NamedTuple):
    """Layer norm whose variance has a lower limit instead of an epsilon, as llama.cpp computes it."""

    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def take(cls, w: RoleWeights, name: str, n: int) -> ChannelNorm:
        """Take the norm `name`, as far as the file has it. Raises InvalidModel."""
        return cls(w.optional(f"{name}.weight", n), w.optional(f"{name}.bias", n))

    def __call__(self, step: EncoderPass, x: Tensor, name: str) -> Tensor:
        x = sub(x, mean(x))
        x = div(x, sqrt(clamp(mean(sqr(x)), step.norm_eps, _MOST)))
        return _affine(x, self.weight, self.bias)


class ResponseNorm(NamedTuple):
    """Global response normalization: each channel grows with its share of the norm of all."""

    weight: Tensor | None
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        n = x.ne[0]
        norms = sqrt(reshape(sum_rows(cont(transpose(sqr(x)))), n, 1))
        shares = div(norms, clamp(mean(norms), _LEAST_SUM, _MOST))
        return add(_affine(mul(x, shares), self.weight, self.bias), x)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = mul(x, weight)
    return x if bias is None else add(x, bias)


class Block(NamedTuple):
    """A depthwise convolution, then a network of two matrices with a norm between them."""

    depthwise: DepthwiseConvolution
    norm: ChannelNorm
    up: Linear
    response: ResponseNorm
    down: Linear

    @classmethod
    def take(cls, weights: Weights, name: str, n: int) -> Block:
        """Take the weights `name`.*. Raises InvalidModel."""
        w = weights.shared
        n_ff = weights.ne(f"{name}.pw1.weight")[1]
        response = ResponseNorm(*(w.optional(f"{name}.grn.{which}", n_ff) for which in ("weight", "bias")))
        return cls(
            DepthwiseConvolution.take(weights, f"{name}.dw", n),
            ChannelNorm.take(w, f"{name}.ln", n),
            w.linear(f"{name}.pw1", n, n_ff),
            response,
            w.linear(f"{name}.pw2", n_ff, n),
        )

    def __call__(self, step: EncoderPass, x: Tensor, side: int, name: str) -> Tensor:
        kernel = Kernel(self.depthwise.size, 1, 3, 3)
        h = self.norm(step, self.depthwise(x, side, side, kernel, f"{name}.dw"), f"{name}.ln")
        h = self.response(unary(self.up(step, h, f"{name}.pw1"), UnaryOp.GELU_ERF))
        return add(x, self.down(step, h, f"{name}.pw2"))


class Stage(NamedTuple):
    """Blocks, before which the grid may be halved."""

    norm: ChannelNorm
    halving: Convolution | None
    blocks: list[Block]


class RekaEncoder(MediaEncoder):
    """Reka Edge: the means of 8 × 8 areas, projected; pictures of one size."""

    def _take_weights(self, weights: Weights) -> None:
        keys, w = self.keys, weights.shared
        size, patch = keys.int_("image_size"), keys.int_("patch_size")
        mean, std = keys.colors
        self.options = ImageOptions(image_size=size, patch_size=patch, mean=mean, std=std, resize=STRETCHED)
        self._eps = keys.float_("attention.layer_norm_epsilon")
        self._side = size // patch
        n = weights.ne("v.patch_embd.weight")[3]
        self._patches = PatchEmbedding.take(weights, patch, n)
        self._norm = ChannelNorm.take(w, "v.patch_ln", n)
        self._stages = []
        side = self._side
        for i in count():
            stage, n = _take_stage(weights, f"v.stage.{i}", n)
            if stage.halving is None and not stage.blocks:
                break
            self._stages.append(stage)
            side = side if stage.halving is None else side // 2
        if not side or side // max(1, side // _POOLED) != _POOLED:
            raise InvalidModel(f"a grid of {side} × {side} places does not become one of {_POOLED} × {_POOLED}")
        self._side_out = side
        self._positions: Tensor | None = None
        if weights.has("v.vision_pos_embed") and weights.ne("v.vision_pos_embed")[1] == side * side:
            self._positions = w.require("v.vision_pos_embed", n, side * side)
        self._projection = Projection.take(w, "mm.0", "mm.2", n, UnaryOp.GELU_ERF)
        self.n_embd = self._projection.n_out

    def prepare(self, media: Media) -> list[Piece]:
        given = self.input(fixed_size(media, self.options).image)
        return ["<image>", MediaChunk(self.kind, given, _POOLED**2, self.digest(media)), "</image>"]

    def input(self, pixels: NDArray[np.float32]) -> EncoderInput:
        """Return the input for a prepared picture, float32 [side, side, 3]."""
        return EncoderInput((), {PATCHES: patches(pixels, self.options.patch_size), **self._arrays()})

    def _arrays(self) -> Mapping[str, NDArray[Any]]:
        """Return the rows that the convolutions and the means read."""
        found, side = {}, self._side
        for i, stage in enumerate(self._stages):
            if stage.halving is not None:
                found[f"taps_{i}"] = _HALVING.taps(side, side)
                side = _HALVING.n_out(side)
        area = side // _POOLED
        inside = np.arange(side * side, dtype=np.int32).reshape(side, side)[: area * _POOLED, : area * _POOLED]
        order = merged_order(area * _POOLED, area * _POOLED, area)
        return {**found, "areas": np.ascontiguousarray(inside.reshape(-1)[order])}

    def build(self, shape: tuple[int, ...]) -> Graph:
        step = EncoderPass(self._eps)
        side = self._side
        x = self._norm(step, self._patches(step, side * side), "patch_ln")
        for i, stage in enumerate(self._stages):
            if stage.halving is not None:
                side = _HALVING.n_out(side)
                x = stage.halving(step, stage.norm(step, x, f"down-{i}"), f"taps_{i}", side * side, f"down-{i}")
            for j, block in enumerate(stage.blocks):
                x = block(step, x, side, f"stage.{i}.{j}")
        if self._positions is not None:
            x = add(x, self._positions, "pos_embed")
        area = side // _POOLED
        x = get_rows(x, step.input("areas", (area * _POOLED) ** 2, type=TensorType.I32))
        step.graph.output(EMBEDDINGS, self._projection(step, mean_of_groups(x, area * area), "projection"))
        return step.graph


def _take_stage(weights: Weights, name: str, n: int) -> tuple[Stage, int]:
    """Return a stage, which may be empty, and the width of its result. Raises InvalidModel."""
    norm, halving = ChannelNorm.take(weights.shared, f"{name}.down.ln", n), None
    if weights.has(f"{name}.down.conv.weight"):
        halving = Convolution.take(weights, f"{name}.down.conv", _HALVING.size, n)
        n = halving.n_out
    blocks: list[Block] = []
    for i in count():
        if not weights.has(f"{name}.blk.{i}.dw.weight"):
            return Stage(norm, halving, blocks), n
        blocks.append(Block.take(weights, f"{name}.blk.{i}", n))
    raise AssertionError
