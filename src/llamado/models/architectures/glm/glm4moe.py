"""The glm4moe architecture: GLM-4.5, 4.6 and 4.7, their Air models, Solar Open (arXiv 2508.06471)."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import Gating, HyperParameters, mrope_text_mode, read_experts, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class Glm4MoeModel(Decoder):
    """Partially rotated heads; a mixture of experts with shared experts after the dense first layers.

    RouterKind is by sigmoid with a selection bias. Some models have query and key norms.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=mrope_text_mode(keys, RopeMode.NEOX))
        used = max(keys.int_("expert_used_count"), 1)
        return replace(hp, experts=read_experts(keys, hp.n_ff[0] // used, gating=Gating.SIGMOID, from_file=True))

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        normed = w.has("attn_q_norm.weight")
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                q_norm=RmsNorm.take(w, "attn_q_norm", heads.dim_k) if normed else None,
                k_norm=RmsNorm.take(w, "attn_k_norm", heads.dim_k) if normed else None,
                rope=hp.rope,
                scale=hp.attention_scale,
            ),
            # The file's "post attention norm" is the norm before the feed-forward network.
            ffn_norm=RmsNorm.take(w, "post_attention_norm", hp.n_embd),
            feed_forward=self._take_feed_forward(w, layer),
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        n_embd, experts = self.hparams.n_embd, self.hparams.experts
        assert experts is not None
        if layer < experts.n_dense_layers:
            return super()._take_feed_forward(w, layer)
        n_shared = experts.n_shared
        shared = GatedFeedForward.take(w, n_embd, n_shared * experts.n_ff, suffix="_shexp") if n_shared else None
        return Mixture.take(w, n_embd, experts, shared=shared)
