"""The gemma3 architecture (text): five sliding-window layers for each full-attention layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamado.ggml.ops import GluOp, RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import (
    HyperParameters,
    inverse_sqrt,
    override_freq_base,
    read_hparams,
    read_swa_layers,
    swa_rope,
)
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights

_LAYERS_OF_27B = 62


class Gemma3Model(Decoder):
    """Pre- and post-norms of both blocks, query and key norms, and GEGLU networks."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        hp = replace(
            hp,
            # Files made by Ollama may call the two bases "global" and "local".
            rope=override_freq_base(keys, hp.rope, keys.float_("rope.global.freq_base", hp.rope.freq_base)),
            embedding_scale=float(np.sqrt(np.float32(hp.n_embd))),
            # Only the 27B model scales by n_embd / n_head instead of the head size.
            attention_scale=inverse_sqrt(hp.n_embd // hp.n_head[0] if hp.n_layer == _LAYERS_OF_27B else hp.head_dim_k),
            final_logit_softcap=keys.float_("final_logit_softcapping", 0.0),
        )
        n_swa = keys.int_("attention.sliding_window", 0)
        if not n_swa:
            return hp
        return replace(
            hp,
            n_swa=n_swa,
            swa_layers=read_swa_layers(keys, hp.n_layer, 6),
            # Only the global layers use the extended context rope.
            rope_swa=swa_rope(keys, hp.rope, freq_base=keys.float_("rope.local.freq_base", 10000.0), freq_scale=1.0),
        )

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                q_norm=RmsNorm.take(w, "attn_q_norm", heads.dim_k),
                k_norm=RmsNorm.take(w, "attn_k_norm", heads.dim_k),
                rope=hp.rope_of(layer),
                scale=hp.attention_scale,
                scale_queries=True,
            ),
            attn_post_norm=RmsNorm.take(w, "post_attention_norm", hp.n_embd),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], GluOp.GEGLU),
            ffn_post_norm=RmsNorm.take(w, "post_ffw_norm", hp.n_embd),
        )
