"""MobileNetV5, the vision encoder of Gemma 3n (clip.cpp, models/mobilenetv5.cpp).

Hidden states have one row for each place of the picture, row by row, so that convolutions of size 1 are matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import isqrt, sqrt
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add, concat, gelu, get_rows, mul, mul_mat, reshape, rms_norm, scale
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput, MediaChunk, Piece
from llamado.media.media import Media
from llamado.media.patches import merged_order
from llamado.media.preprocessing import ImageOptions, fixed_size
from llamado.media.resize import Resize, ResizeFilter
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass, MediaEncoder
from llamado.models.encoders.parts.grid_convolution import Convolution, DepthwiseConvolution, Kernel
from llamado.models.encoders.parts.patches import PATCHES
from llamado.models.encoders.parts.rows import mean_of_groups
from llamado.models.encoders.parts.transformer import attend
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import Weights

_EPS = 1e-6
_SIDE_OUT = 16
_STEM = 3
_N_STAGES = 4
_FUSED = 2, 3
"""Stages whose results are fused."""


class ConvolutionWithNorm(NamedTuple):
    """A convolution and the norm behind it, if the file has one."""

    convolution: Convolution
    norm: RmsNorm | None

    @classmethod
    def take(cls, weights: Weights, name: str, norm: str, n_in: int) -> ConvolutionWithNorm:
        """Take `name.weight` and the norm `norm`. Raises InvalidModel."""
        convolution = Convolution.take(weights, name, weights.ne(f"{name}.weight")[0], n_in)
        return cls(convolution, _norm(weights, norm, convolution.n_out))

    @property
    def n_out(self) -> int:
        """Width of the result."""
        return self.convolution.n_out

    def __call__(self, step: EncoderPass, x: Tensor, name: str, taps: str = "", n: int | None = None) -> Tensor:
        x = self.convolution(step, x, taps, x.ne[1] if n is None else n, name)
        return x if self.norm is None else self.norm(step, x, f"{name}_norm")


class DepthwiseWithNorm(NamedTuple):
    """A depthwise convolution and the norm behind it, if the file has one."""

    convolution: DepthwiseConvolution
    norm: RmsNorm | None

    @classmethod
    def take(cls, weights: Weights, name: str, norm: str, n: int) -> DepthwiseWithNorm | None:
        """Take `name.weight` and the norm `norm`, or return None if the file does not have it. Raises InvalidModel."""
        if not weights.has(f"{name}.weight"):
            return None
        return cls(DepthwiseConvolution.take(weights, name, n), _norm(weights, norm, n))

    def __call__(self, step: EncoderPass, x: Tensor, side: int, stride: int, name: str) -> Tensor:
        x = self.convolution(x, side, side, _kernel(self.convolution.size, stride, side), name)
        return x if self.norm is None else self.norm(step, x, f"{name}_norm")


def _norm(weights: Weights, name: str, n: int) -> RmsNorm | None:
    return RmsNorm.take(weights.shared, name, n) if weights.has(f"{name}.weight") else None


def _kernel(size: int, stride: int, side: int) -> Kernel:
    """Return a kernel whose result has ⌈side / stride⌉ places a side."""
    return Kernel.same(size, stride, side) if stride > 1 else Kernel(size, 1, size // 2, size // 2)


class Block(Protocol):
    """A block of a stage; the first of a stage halves the grid, if its `stride` is 2."""

    @property
    def n_out(self) -> int: ...

    @property
    def size(self) -> int:
        """Side of the kernel that gathers rows; 0: none."""
        ...

    @property
    def is_halving(self) -> bool:
        """True if it can halve the grid."""
        ...

    def __call__(self, step: EncoderPass, x: Tensor, side: int, stride: int, name: str) -> Tensor: ...


class EdgeResidual(NamedTuple):
    """A convolution with a kernel, and one of size 1."""

    expand: ConvolutionWithNorm
    project: ConvolutionWithNorm
    is_halving: bool = True

    @classmethod
    def take(cls, weights: Weights, name: str, n: int) -> EdgeResidual:
        """Take the weights `name`.*. Raises InvalidModel."""
        expand = ConvolutionWithNorm.take(weights, f"{name}.conv_exp", f"{name}.bn1", n)
        return cls(expand, ConvolutionWithNorm.take(weights, f"{name}.conv_pwl", f"{name}.bn2", expand.n_out))

    @property
    def n_out(self) -> int:
        return self.project.n_out

    @property
    def size(self) -> int:
        return self.expand.convolution.size

    def __call__(self, step: EncoderPass, x: Tensor, side: int, stride: int, name: str) -> Tensor:
        n = _kernel(self.size, stride, side).n_out(side) ** 2
        h = gelu(self.expand(step, x, f"{name}.conv_exp", f"taps-{name}", n))
        h = self.project(step, h, f"{name}.conv_pwl")
        return add(h, x) if stride == 1 and h.ne[0] == x.ne[0] else h


class InvertedResidual(NamedTuple):
    """Universal inverted bottleneck: matrices that widen and narrow, with depthwise convolutions around the first."""

    start: DepthwiseWithNorm | None
    expand: ConvolutionWithNorm | None
    middle: DepthwiseWithNorm | None
    project: ConvolutionWithNorm | None
    scale: Tensor | None
    n_out: int
    size: int = 0

    @classmethod
    def take(cls, weights: Weights, name: str, n: int) -> InvertedResidual:
        """Take the weights `name`.*. Raises InvalidModel."""
        start = DepthwiseWithNorm.take(weights, f"{name}.dw_start.conv", f"{name}.dw_start.bn", n)
        expand = _optional(weights, f"{name}.pw_exp", n)
        n = n if expand is None else expand.n_out
        middle = DepthwiseWithNorm.take(weights, f"{name}.dw_mid.conv", f"{name}.dw_mid.bn", n)
        project = _optional(weights, f"{name}.pw_proj", n)
        n = n if project is None else project.n_out
        return cls(start, expand, middle, project, _layer_scale(weights, name, n), n)

    @property
    def is_halving(self) -> bool:
        return self.middle is not None

    def __call__(self, step: EncoderPass, x: Tensor, side: int, stride: int, name: str) -> Tensor:
        h = x
        if self.start is not None:
            h = self.start(step, h, side, 1, f"{name}.dw_start")
        if self.expand is not None:
            h = gelu(self.expand(step, h, f"{name}.pw_exp"))
        if self.middle is not None:
            h = gelu(self.middle(step, h, side, stride, f"{name}.dw_mid"))
        if self.project is not None:
            h = self.project(step, h, f"{name}.pw_proj")
        if self.scale is not None:
            h = mul(h, self.scale)
        return add(h, x) if h.ne == x.ne else h


class MultiQueryAttention(NamedTuple):
    """Attention of all places to those of a grid of half the side, which all heads share."""

    norm: RmsNorm | None
    query: Convolution
    key_down: DepthwiseWithNorm | None
    key: Convolution
    value_down: DepthwiseWithNorm | None
    value: Convolution
    output: Convolution
    scale: Tensor | None
    n_out: int
    size: int = 0
    is_halving: bool = False

    @classmethod
    def take(cls, weights: Weights, name: str, n: int) -> MultiQueryAttention:
        """Take the weights `name`.*. Raises InvalidModel."""

        def part(which: str, n_in: int) -> Convolution:
            return Convolution.take(weights, f"{name}.attn.{which}.proj", 1, n_in)

        def down(which: str) -> DepthwiseWithNorm | None:
            return DepthwiseWithNorm.take(weights, f"{name}.attn.{which}.down_conv", f"{name}.attn.{which}.norm", n)

        query, key, value = (part(which, n) for which in ("query", "key", "value"))
        if query.n_out % key.n_out or key.n_out % 8 or value.n_out != key.n_out:
            raise InvalidModel(f"'{name}': queries, keys and values of {query.n_out}, {key.n_out} and {value.n_out}")
        output = part("output", query.n_out)
        return cls(
            _norm(weights, f"{name}.norm", n),
            query,
            down("key"),
            key,
            down("value"),
            value,
            output,
            _layer_scale(weights, name, output.n_out),
            output.n_out,
        )

    def __call__(self, step: EncoderPass, x: Tensor, side: int, stride: int, name: str) -> Tensor:
        h = x if self.norm is None else self.norm(step, x, f"{name}.norm")
        dim = self.key.n_out
        q = reshape(self.query(step, h, "", h.ne[1], f"{name}.query"), dim, self.query.n_out // dim, h.ne[1])

        def shared(down: DepthwiseWithNorm | None, part: Convolution, which: str) -> Tensor:
            rows = h if down is None else down(step, h, side, 2, f"{name}.{which}_down")
            return reshape(part(step, rows, "", rows.ne[1], f"{name}.{which}"), dim, 1, rows.ne[1])

        k, v = shared(self.key_down, self.key, "key"), shared(self.value_down, self.value, "value")
        h = self.output(step, attend(q, k, v, dim**-0.5), "", x.ne[1], f"{name}.output")
        if h.ne[0] != x.ne[0]:
            return h
        return add(h if self.scale is None else mul(h, self.scale), x)


def _optional(weights: Weights, name: str, n: int) -> ConvolutionWithNorm | None:
    """Take `name`.conv and `name`.bn, if the file has them. Raises InvalidModel."""
    return (
        ConvolutionWithNorm.take(weights, f"{name}.conv", f"{name}.bn", n)
        if weights.has(f"{name}.conv.weight")
        else None
    )


def _layer_scale(weights: Weights, name: str, n: int) -> Tensor | None:
    found = weights.shared.optional(f"{name}.layer_scale.gamma", 1, 1, n)
    return None if found is None else reshape(found, n)


def _take_block(weights: Weights, name: str, n: int) -> Block | None:
    """Take a block, or return None if the file does not have it. Raises InvalidModel."""
    if weights.has(f"{name}.conv_exp.weight"):
        return EdgeResidual.take(weights, name, n)
    if weights.has(f"{name}.attn.query.proj.weight"):
        return MultiQueryAttention.take(weights, name, n)
    if weights.has(f"{name}.dw_start.conv.weight") or weights.has(f"{name}.pw_exp.conv.weight"):
        return InvertedResidual.take(weights, name, n)
    return None


class Gemma3nEncoder(MediaEncoder):
    """Gemma 3n: the results of the last two stages are fused, averaged to 16 × 16 places, normed and projected."""

    def _take_weights(self, weights: Weights) -> None:
        keys, w = self.keys, weights.shared
        self.size = keys.int_("image_size")
        mean, std = keys.colors
        how = Resize(ResizeFilter.BILINEAR)
        self.options = ImageOptions(image_size=self.size, patch_size=1, mean=mean, std=std, resize=how)
        n = weights.ne("v.conv_stem.conv.weight")[3]
        self._stem = Linear(
            w.require("v.conv_stem.conv.weight", _STEM, _STEM, 3, n), w.optional("v.conv_stem.conv.bias", 1, 1, n)
        )
        self._stem_norm = _norm(weights, "v.conv_stem.bn", n)
        self._stages: list[list[Block]] = []
        widths = []
        for i in range(_N_STAGES):
            blocks = []
            for j in count():
                block = _take_block(weights, f"v.blk.{i}.{j}", n)
                if block is None:
                    break
                n = block.n_out
                blocks.append(block)
            if not blocks:
                raise InvalidModel(f"the encoder has no blocks 'v.blk.{i}.*'")
            self._stages.append(blocks)
            widths.append(n)
        n = sum(widths[i] for i in _FUSED)
        self._expand, self._project = (None, None)
        self._expand = _optional(weights, "v.msfa.ffn.pw_exp", n)
        n = n if self._expand is None else self._expand.n_out
        self._project = _optional(weights, "v.msfa.ffn.pw_proj", n)
        n = n if self._project is None else self._project.n_out
        self._norm = _norm(weights, "v.msfa.norm", n)
        self._embedding_norm = RmsNorm.take(w, "mm.soft_emb_norm", n)
        self.n_embd = weights.ne("mm.input_projection.weight")[1]
        self._projection = Linear(w.require("mm.input_projection.weight", n, self.n_embd))
        sides = self._sides()
        fine, coarse = (sides[i] for i in _FUSED)
        if fine % coarse or fine < _SIDE_OUT or fine % _SIDE_OUT:
            raise InvalidModel(f"grids of {fine} and {coarse} places a side do not become one of {_SIDE_OUT}")

    def _halvings(self) -> Iterator[tuple[int, int, Block, int, int]]:
        """Return stage and number of each block, with its stride and the side of the grid before it."""
        side = Kernel.same(_STEM, 2, self.size).n_out(self.size)
        for i, blocks in enumerate(self._stages):
            for j, block in enumerate(blocks):
                stride = 2 if j == 0 and block.is_halving else 1
                yield i, j, block, stride, side
                side = -(-side // stride)

    def _sides(self) -> list[int]:
        """Return the sides of the grid behind each stage."""
        found = [0] * _N_STAGES
        for i, _, _, stride, side in self._halvings():
            found[i] = -(-side // stride)
        return found

    def prepare(self, media: Media) -> list[Piece]:
        given = self.input(fixed_size(media, self.options).image)
        return ["<start_of_image>", MediaChunk(self.kind, given, _SIDE_OUT**2, self.digest(media)), "<end_of_image>"]

    def input(self, pixels: NDArray[np.float32]) -> EncoderInput:
        """Return the input for a prepared picture, float32 [side, side, 3]."""
        taps = Kernel.same(_STEM, 2, self.size).taps(self.size, self.size)
        rows = np.concatenate([pixels.reshape(-1, 3), np.zeros((1, 3), np.float32)])
        windows = rows[taps].transpose(0, 2, 1).reshape(len(taps), -1)
        found: dict[str, NDArray[Any]] = {PATCHES: np.ascontiguousarray(windows)}
        for i, j, block, stride, side in self._halvings():
            if block.size:
                found[f"taps-{i}.{j}"] = _kernel(block.size, stride, side).taps(side, side)
        fine, coarse = (self._sides()[i] for i in _FUSED)
        if coarse < fine:
            places = np.arange(coarse * coarse, dtype=np.int32).reshape(coarse, coarse)
            found["nearest"] = np.ascontiguousarray(places.repeat(fine // coarse, 0).repeat(fine // coarse, 1))
        if fine > _SIDE_OUT:
            found["areas"] = merged_order(fine, fine, fine // _SIDE_OUT)
        return EncoderInput((), found)

    def build(self, shape: tuple[int, ...]) -> Graph:
        step = EncoderPass(_EPS)
        x = self._stem_of(step)
        fused: list[Tensor] = []
        for i, j, block, stride, side in self._halvings():
            x = block(step, x, side, stride, f"{i}.{j}")
            if i in _FUSED and j == len(self._stages[i]) - 1:
                fused.append(x)
        x = self._fuse(step, *fused)
        x = self._embedding_norm(step, scale(x, sqrt(x.ne[0])), "soft_emb_norm")
        step.graph.output(EMBEDDINGS, rms_norm(self._projection(step, x, "projection"), _EPS))
        return step.graph

    def _stem_of(self, step: EncoderPass) -> Tensor:
        """Return the first convolution, whose windows the host makes."""
        (_, _, colors, n), side = self._stem.weight.ne, Kernel.same(_STEM, 2, self.size).n_out(self.size)
        n_in = _STEM * _STEM * colors
        x = mul_mat(reshape(self._stem.weight, n_in, n), step.input(PATCHES, n_in, side * side), name="conv_stem")
        if self._stem.bias is not None:
            x = add(x, reshape(self._stem.bias, n))
        return gelu(x if self._stem_norm is None else self._stem_norm(step, x, "conv_stem_norm"))

    def _fuse(self, step: EncoderPass, fine: Tensor, coarse: Tensor) -> Tensor:
        """Return the results of two stages as one with 16 × 16 places."""
        n = fine.ne[1]
        if coarse.ne[1] < n:
            coarse = get_rows(coarse, step.input("nearest", n, type=TensorType.I32))
        x = concat(fine, coarse, 0)
        if self._expand is not None:
            x = gelu(self._expand(step, x, "msfa_expand"))
        if self._project is not None:
            x = self._project(step, x, "msfa_project")
        if isqrt(n) > _SIDE_OUT:
            areas = get_rows(x, step.input("areas", n, type=TensorType.I32))
            x = mean_of_groups(areas, n // _SIDE_OUT**2)
        return x if self._norm is None else self._norm(step, x, "msfa_norm")
