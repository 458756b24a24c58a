"""The gemma2 architecture: sliding-window and full attention in alternating layers."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.gemma.gemma import GemmaModel
from llamado.models.decoder import PRE_AND_POST_NORMS
from llamado.models.hparams import HyperParameters, inverse_sqrt, read_swa_layers, swa_rope
from llamado.models.keys import Keys

_LAYERS_OF_27B = 46


class Gemma2Model(GemmaModel):
    """Pre- and post-norms of both blocks, and soft caps of scores and logits (arXiv 2408.00118)."""

    norms = PRE_AND_POST_NORMS

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(
            hp,
            # Only the 27B model scales by n_embd / n_head instead of the head size.
            attention_scale=inverse_sqrt(hp.n_embd // hp.n_head[0] if hp.n_layer == _LAYERS_OF_27B else hp.head_dim_k),
            attention_softcap=keys.float_("attn_logit_softcapping", 50.0),
            final_logit_softcap=keys.float_("final_logit_softcapping", 30.0),
            n_swa=keys.int_("attention.sliding_window", 4096),
            swa_layers=read_swa_layers(keys, hp.n_layer, 2),
            rope_swa=swa_rope(keys, hp.rope),
        )
