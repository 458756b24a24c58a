"""The mpt architecture: MPT 7B, 30B."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import add, get_rows
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import LayerNormDecoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention
from llamado.models.parts.feedforward import FeedForward, UngatedFeedForward
from llamado.models.weights import RoleWeights, Weights


class MptModel(LayerNormDecoder):
    """Layer norms, GELU networks, and learned positions or ALiBi, depending on the file."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._clamp = keys.float_("attention.clamp_kqv", 0.0)
        self._max_bias = keys.float_("attention.max_alibi_bias", 0.0)
        return super()._read_hparams(keys, n_vocab)

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._positions = weights.input.optional("position_embd.weight", hp.n_embd, hp.n_ctx_train)
        super()._take_weights(weights)

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        attention = super()._take_attention(w, layer)
        return replace(attention, rope=None, clamp=self._clamp, max_bias=self._max_bias)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return UngatedFeedForward.take(w, self.hparams.n_embd, self.hparams.n_ff[layer], UnaryOp.GELU)

    def _embed(self, step: Pass) -> Tensor:
        x = super()._embed(step)
        return x if self._positions is None else add(x, get_rows(self._positions, step.positions()), "inp_embd")
