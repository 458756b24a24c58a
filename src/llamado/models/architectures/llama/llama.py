"""The llama architecture: Llama 1 to 3, Mistral, Mixtral, SmolLM and all others saved under its name."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.errors import InvalidModel
from llamado.models.hparams import HyperParameters, read_experts, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class LlamaModel(Decoder):
    """Pre-norm decoder: grouped-query attention with rotary positions, then a SwiGLU network.

    Mixtral (arXiv 2401.04088) has several such networks as experts.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL)
        if hp.rope.n_dims != hp.head_dim_k:
            raise InvalidModel(
                f"metadata key '{keys.name('rope.dimension_count')}' is {hp.rope.n_dims}; {hp.head_dim_k} is expected"
            )
        return replace(hp, experts=read_experts(keys, hp.n_ff[0], normalized=True)) if keys.has_experts() else hp

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                scale=hp.attention_scale,
                rope=hp.rope,
                factors=self._freq_factors,
            ),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=self._take_feed_forward(w, layer),
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp = self.hparams
        return Mixture.take(w, hp.n_embd, hp.experts) if hp.experts else super()._take_feed_forward(w, layer)
