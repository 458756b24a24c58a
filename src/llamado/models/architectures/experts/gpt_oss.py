"""The gpt-oss architecture: gpt-oss 20B and 120B."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import GluOp, RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import (
    Gating,
    HyperParameters,
    inverse_sqrt,
    read_experts,
    read_hparams,
    read_swa_layers,
    swa_rope,
)
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads
from llamado.models.parts.experts import Mixture
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class GptOssModel(Decoder):
    """Sliding window in every other layer, attention sinks, and experts with biases (arXiv 2508.10925)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        return replace(
            hp,
            attention_scale=inverse_sqrt(hp.rope.n_dims),
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=read_swa_layers(keys, hp.n_layer, 2),
            rope_swa=swa_rope(keys, hp.rope),
            experts=read_experts(keys, hp.n_ff[0], gating=Gating.SOFTMAX_WEIGHT),
        )

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        assert hp.experts is not None
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                scale=hp.attention_scale,
                rope=hp.rope_of(layer),
                sinks=w.require("attn_sinks.weight", heads.n),
            ),
            ffn_norm=RmsNorm.take(w, "post_attention_norm", hp.n_embd),
            feed_forward=Mixture.take(w, hp.n_embd, hp.experts, GluOp.SWIGLU_OAI),
        )
