"""GLM-4.xV, GLM-OCR and GLM-5V (clip.cpp, models/glm4v.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add, mul_mat, reshape, unary
from llamado.ggml.ops import UnaryOp
from llamado.gguf.types import TensorType
from llamado.media.media import Media
from llamado.media.model_sizes import glm5v
from llamado.media.preprocessing import PreparedPicture
from llamado.models.encoders.dynamic import DynamicEncoder, image_options, limited_by_file, limited_by_tokens
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.grids import PatchGrid
from llamado.models.encoders.parts.frames import FramePairEmbedding
from llamado.models.encoders.parts.interpolation import Interpolation, PositionTable
from llamado.models.encoders.parts.patches import ORDER
from llamado.models.encoders.parts.rotation import POSITIONS, grid_positions, rotate_halves
from llamado.models.encoders.parts.rows import merge_by_channel
from llamado.models.encoders.parts.transformer import EncoderFeedForward, EncoderTransformer, NormKind, take_norm
from llamado.models.errors import InvalidModel
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import Weights

_THETA = 10_000.0
_PROJECTOR_EPS = 1e-5


class Glm4vEncoder(DynamicEncoder):
    """GLM-4.xV: RMS norms, rotary and maybe learned positions; squares of patches go through a convolution."""

    texts = "<|begin_of_image|>", "<|end_of_image|>"

    def _take_weights(self, weights: Weights) -> None:
        self.take_sizes()
        self._take_limits()
        keys, shared = self.keys, weights.shared
        limit = self._read_limit()
        self._transformer = EncoderTransformer(keys, weights, norm=NormKind.RMS, limit=limit)
        n = self._transformer.n_embd
        self._patches = FramePairEmbedding.take(weights, self.patch, n)
        if self._patches.bias is None:
            raise InvalidModel("tensor 'v.patch_embd.bias' is missing")
        self._patch_norm = (
            take_norm(shared, "v.norm_embd", n, NormKind.RMS) if weights.has("v.norm_embd.weight") else None
        )
        self._positions: PositionTable | None = None
        if weights.has("v.position_embd.weight"):
            side = isqrt(weights.ne("v.position_embd.weight")[1])
            table = shared.require("v.position_embd.weight", n, side * side)
            self._positions = PositionTable(table, side, side, Interpolation.BICUBIC)
        n_merged = weights.ne("mm.patch_merger.weight")[3]
        self._merger = shared.require("mm.patch_merger.weight", self.merge, self.merge, n, n_merged)
        self._merger_bias = shared.require("mm.patch_merger.bias", n_merged)
        n_out = weights.ne("mm.model.fc.weight")[1]
        self._projection = shared.require("mm.model.fc.weight", n_merged, n_out)
        self._projection_norm = LayerNorm(
            shared.require("mm.post_norm.weight", n_out), shared.optional("mm.post_norm.bias", n_out)
        )
        n_ff, self.n_embd = weights.ne("mm.up.weight")[1], weights.ne("mm.down.weight")[1]
        self._feed_forward = EncoderFeedForward(
            shared.linear("mm.up", n_out, n_ff),
            shared.linear("mm.down", n_ff, self.n_embd),
            shared.linear("mm.gate", n_out, n_ff),
            self._transformer.activation,
            limit,
        )

    def _take_limits(self) -> None:
        """Read the options of preprocessing. Raises GgufError or InvalidModel."""
        self.options = limited_by_tokens(self.keys, image_options(self.keys, self.merge), 8, 4096)

    def _read_limit(self) -> float:
        """Return the limit of the factors in gated activations; 0: none. Raises GgufError or InvalidModel."""
        return 0.0

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {POSITIONS: grid_positions(order // grid.nx, order % grid.nx)}
        if self._positions is None:
            return arrays
        return {**arrays, ORDER: order, **self._positions.arrays(*grid)}

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        x = self._patches(step, grid.n)
        if self._patch_norm is not None:
            x = self._patch_norm(step, x, "norm_embd")
        if self._positions is not None:
            order = step.input(ORDER, grid.n, type=TensorType.I32)
            x = add(x, self._positions.rows(step, *grid, order), "pos_embed")
        x = self._transformer(step, x, rotate_halves(step, grid.n, _THETA))
        merged = merge_by_channel(x, self.merge**2)
        x = mul_mat(reshape(self._merger, merged.ne[0], self._merger.ne[3]), merged, name="patch_merger")
        x = mul_mat(self._projection, add(x, self._merger_bias), name="fc")
        x = unary(self._projection_norm(step.with_eps(_PROJECTOR_EPS), x, "post_norm"), UnaryOp.GELU_ERF)
        step.graph.output(EMBEDDINGS, self._feed_forward(step, x, "projection"))
        return step.graph


class Glm5vEncoder(Glm4vEncoder):
    """GLM-5V: limited gated activations, and pictures on the upper left of a black canvas."""

    def _take_limits(self) -> None:
        options = limited_by_file(self.keys, image_options(self.keys, self.merge))
        self.options = limited_by_tokens(self.keys, options, 0, 0)

    def _read_limit(self) -> float:
        return self.keys.float_("swiglu_clamp")

    def preprocess(self, media: Media) -> PreparedPicture:
        return glm5v(media, self.options)
