"""The exaone4 architecture: EXAONE 4.0."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import HyperParameters, read_hparams, read_swa_layers
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights

_LAYERS_OF_32B = 64


class Exaone4Model(Decoder):
    """Post-norm blocks without pre-norms, with query and key norms (arXiv 2507.11407).

    In the 32B model, three of four layers have a sliding window; the fourth has full attention without positions.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        if hp.n_layer != _LAYERS_OF_32B:
            return hp
        n_swa = keys.int_("attention.sliding_window", 4096)
        return replace(hp, n_swa=n_swa, swa_layers=read_swa_layers(keys, hp.n_layer, 4))

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        return Layer(
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                q_norm=RmsNorm.take(w, "attn_q_norm", heads.dim_k),
                k_norm=RmsNorm.take(w, "attn_k_norm", heads.dim_k),
                rope=hp.rope if hp.is_swa(layer) or not hp.n_swa else None,
                factors=self._freq_factors,
                scale=hp.attention_scale,
            ),
            attn_post_norm=RmsNorm.take(w, "post_attention_norm", hp.n_embd),
            feed_forward=GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer]),
            ffn_post_norm=RmsNorm.take(w, "post_ffw_norm", hp.n_embd),
        )
