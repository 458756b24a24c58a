"""The minimax-m2 architecture: MiniMax-M2."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import Gating, HyperParameters, read_experts, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads
from llamado.models.parts.experts import Mixture
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class MinimaxM2Model(Decoder):
    """Half-rotated heads, norms of whole query and key rows, and sigmoid routing with a selection bias."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        experts = read_experts(keys, hp.n_ff[0], gating=Gating.SIGMOID, from_file=True)
        # Weights are normalized and unscaled, whatever the file says.
        return replace(hp, experts=replace(experts, n_ff=hp.n_ff[0], normalized=True, scale=1.0))

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        assert hp.experts is not None
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                q_norm=RmsNorm.take(w, "attn_q_norm", heads.n * heads.dim_k),
                k_norm=RmsNorm.take(w, "attn_k_norm", heads.n_kv * heads.dim_k),
                norm_rows=True,
                rope=hp.rope,
                scale=hp.attention_scale,
            ),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=Mixture.take(w, hp.n_embd, hp.experts),
        )
