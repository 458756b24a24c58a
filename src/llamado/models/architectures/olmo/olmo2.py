"""The olmo2 architecture: OLMo 2 and OLMo 3."""

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


class Olmo2Model(Decoder):
    """Post-norm blocks without pre-norms, and norms of whole query and key rows (arXiv 2501.00656).

    With a sliding window (OLMo 3), every fourth layer has full attention, and only those use the extended context rope.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        n_swa = keys.int_("attention.sliding_window", 0)
        if not n_swa:
            return hp
        return replace(
            hp,
            n_swa=n_swa,
            swa_layers=read_swa_layers(keys, hp.n_layer, 4),
            rope_swa=replace(hp.rope, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0),
        )

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        return Layer(
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                q_norm=RmsNorm.take(w, "attn_q_norm", heads.n * heads.dim_k),
                k_norm=RmsNorm.take(w, "attn_k_norm", heads.n_kv * heads.dim_k),
                norm_rows=True,
                rope=hp.rope_of(layer),
                scale=hp.attention_scale,
            ),
            attn_post_norm=RmsNorm.take(w, "post_attention_norm", hp.n_embd),
            feed_forward=GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer]),
            ffn_post_norm=RmsNorm.take(w, "post_ffw_norm", hp.n_embd),
        )
