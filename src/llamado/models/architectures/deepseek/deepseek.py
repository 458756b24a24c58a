"""The deepseek architecture: DeepSeek MoE 16B, the predecessor of latent attention."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import HyperParameters, read_experts, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class DeepseekModel(Decoder):
    """Llama with fine-grained experts and shared experts after the dense first layers (arXiv 2401.06066)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL)
        experts = read_experts(keys, hp.n_ff[0], from_file=True)
        return replace(hp, experts=replace(experts, normalized=False))

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
        assert hp.experts is not None
        if layer < hp.experts.n_dense_layers:
            return GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer])
        shared = GatedFeedForward.take(w, hp.n_embd, hp.experts.n_ff * hp.experts.n_shared, suffix="_shexp")
        return Mixture.take(w, hp.n_embd, hp.experts, shared=shared)
