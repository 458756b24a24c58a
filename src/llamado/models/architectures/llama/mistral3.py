"""The mistral3 architecture: Ministral 3, Devstral 2."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import HyperParameters, Temperature, read_experts, read_hparams, yarn_attention_factor
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class Mistral3Model(Decoder):
    """Llama with position-dependent query scaling beyond the training context, and optional experts."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL, read_yarn_betas=True)
        temperature = keys.float_("attention.temperature_scale", 0.0)
        self._temperature = Temperature(temperature, hp.n_ctx_short) if temperature else None
        multiplier = keys.float_("rope.scaling.yarn_log_multiplier", 0.0)
        if keys.has_experts():
            hp = replace(hp, experts=read_experts(keys, hp.n_ff[0], normalized=True))
        if not (hp.rope.ext_factor and multiplier):
            return hp
        return replace(
            hp, rope=replace(hp.rope, attn_factor=hp.rope.attn_factor / yarn_attention_factor(hp.rope, multiplier))
        )

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope,
                factors=self._freq_factors,
                temperature=self._temperature,
                scale=hp.attention_scale,
            ),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=self._take_feed_forward(w, layer),
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp = self.hparams
        return Mixture.take(w, hp.n_embd, hp.experts) if hp.experts else super()._take_feed_forward(w, layer)
