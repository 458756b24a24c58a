"""The phimoe architecture: Phi-3.5-MoE."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import HyperParameters, read_experts, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.experts import Mixture
from llamado.models.parts.norms import Norm, RmsNorm
from llamado.models.weights import RoleWeights


class PhiMoeModel(Decoder):
    """Phi-3 with a mixture of experts in each layer, and biases of norms, attention and logits."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        return replace(hp, experts=read_experts(keys, hp.n_ff[0], normalized=True))

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return RmsNorm.take(w, name, n, biased=True)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        assert hp.experts is not None
        return Layer(
            attn_norm=self._take_norm(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope,
                factors=self._freq_factors,
                scale=hp.attention_scale,
                scale_queries=True,
            ),
            ffn_norm=self._take_norm(w, "ffn_norm", hp.n_embd),
            feed_forward=Mixture.take(w, hp.n_embd, hp.experts),
        )
