"""GLM-Edge-V: SigLIP, a convolution that merges squares of patches, and a gated network."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import add, concat, cont, gelu, mul_mat, permute, reshape, swiglu_split
from llamado.ggml.tensor import Tensor
from llamado.media.patches import merged_order
from llamado.media.resize import PADDED
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.transformer import NormKind, take_norm
from llamado.models.encoders.pictures import join
from llamado.models.encoders.tiled.llava import ClipEncoder
from llamado.models.errors import UnsupportedModel
from llamado.models.weights import Weights


class GlmEdgeEncoder(ClipEncoder):
    """Embeddings of the beginning and end of a picture surround those of the patches."""

    resize = PADDED
    merge = 2
    n_layers_skipped = 0

    def _take_projector(self, weights: Weights) -> None:
        super()._take_projector(weights)
        if self._class is not None:
            raise UnsupportedModel("a class embedding ('v.class_embd') with the projector 'adapter' is not supported")
        w, linear = weights.shared, "adapter.linear"
        n_conv = weights.ne("adapter.conv.weight")[3]
        self._conv = w.require("adapter.conv.weight", 2, 2, self.n_features, n_conv)
        self._conv_bias = w.require("adapter.conv.bias", n_conv)
        n, n_ff = weights.ne(f"{linear}.linear.weight")[1], weights.ne(f"{linear}.gate.weight")[1]
        self.n_embd = weights.ne(f"{linear}.dense_4h_to_h.weight")[1]
        self._first = w.require(f"{linear}.linear.weight", n_conv, n)
        self._norm = take_norm(w, f"{linear}.norm1", n, NormKind.LAYER)
        self._gate = w.require(f"{linear}.gate.weight", n, n_ff)
        self._up = w.require(f"{linear}.dense_h_to_4h.weight", n, n_ff)
        self._down = w.require(f"{linear}.dense_4h_to_h.weight", n_ff, self.n_embd)
        self._begin, self._end = (w.require(f"adapter.{name}", self.n_embd) for name in ("boi", "eoi"))

    def order(self, nx: int, ny: int) -> NDArray[np.int32]:
        return merged_order(nx, ny, self.merge)

    def n_tokens(self, n_patches: int) -> int:
        return super().n_tokens(n_patches) + 2

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        n_out = self._conv.ne[3]
        kernel = reshape(cont(permute(self._conv, 1, 2, 0, 3)), 4 * x.ne[0], n_out)
        x = add(mul_mat(kernel, join(x, self.merge**2)), self._conv_bias, "conv")
        x = gelu(self._norm(step, step.mul_mat(self._first, x, "linear"), "norm1"))
        x = swiglu_split(step.mul_mat(self._gate, x, "gate"), step.mul_mat(self._up, x, "up"))
        x = step.mul_mat(self._down, x, "down")
        begin, end = (reshape(row, self.n_embd, 1) for row in (self._begin, self._end))
        return concat(concat(begin, x, 1), end, 1)
