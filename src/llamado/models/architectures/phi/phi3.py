"""The phi3 architecture: Phi-3, Phi-3.5, Phi-4, Phi-4-mini."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.feedforward import FusedGatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class Phi3Model(Decoder):
    """Pre-norm decoder with fused query, key and value, and fused gate and up matrices (arXiv 2404.14219).

    A sliding window in the file is ignored, as in llama.cpp.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope,
                factors=self._freq_factors,
                scale=hp.attention_scale,
                scale_queries=True,
            ),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=FusedGatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer]),
        )
