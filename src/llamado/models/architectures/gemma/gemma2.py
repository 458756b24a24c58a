"""The gemma2 architecture: sliding-window and full attention in alternating layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamado.ggml.ops import GluOp, RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import HyperParameters, inverse_sqrt, read_hparams, read_swa_layers, swa_rope
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights

_LAYERS_OF_27B = 46


class Gemma2Model(Decoder):
    """Pre- and post-norms of both blocks, and soft caps of scores and logits (arXiv 2408.00118)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        return replace(
            hp,
            embedding_scale=float(np.sqrt(np.float32(hp.n_embd))),
            # Only the 27B model scales by n_embd / n_head instead of the head size.
            attention_scale=inverse_sqrt(hp.n_embd // hp.n_head[0] if hp.n_layer == _LAYERS_OF_27B else hp.head_dim_k),
            attention_softcap=keys.float_("attn_logit_softcapping", 50.0),
            final_logit_softcap=keys.float_("final_logit_softcapping", 30.0),
            n_swa=keys.int_("attention.sliding_window", 4096),
            swa_layers=read_swa_layers(keys, hp.n_layer, 2),
            rope_swa=swa_rope(keys, hp.rope),
        )

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope_of(layer),
                scale=hp.attention_scale,
                scale_queries=True,
                softcap=hp.attention_softcap,
            ),
            attn_post_norm=RmsNorm.take(w, "post_attention_norm", hp.n_embd),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], GluOp.GEGLU),
            ffn_post_norm=RmsNorm.take(w, "post_ffw_norm", hp.n_embd),
        )
