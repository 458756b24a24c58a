"""The bloom architecture: BLOOM, BLOOMZ."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import LayerNormDecoder
from llamado.models.forward import Pass
from llamado.models.parts.attention import Attention
from llamado.models.parts.feedforward import FeedForward, UngatedFeedForward
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights, Weights


class BloomModel(LayerNormDecoder):
    """Layer norms, of embeddings too; ALiBi; GELU networks (arXiv 2211.05100)."""

    def _take_weights(self, weights: Weights) -> None:
        self._embd_norm = LayerNorm.take(weights.input, "token_embd_norm", self.hparams.n_embd)
        super()._take_weights(weights)

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        return replace(super()._take_attention(w, layer), rope=None, max_bias=8.0)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return UngatedFeedForward.take(w, self.hparams.n_embd, self.hparams.n_ff[layer], UnaryOp.GELU)

    def _embed(self, step: Pass) -> Tensor:
        return self._embd_norm(step, super()._embed(step), "inp_norm")
