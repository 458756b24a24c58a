"""The gemma3 architecture (text): five sliding-window layers for each full-attention layer."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.gemma.gemma import GemmaModel
from llamado.models.decoder import PRE_AND_POST_NORMS
from llamado.models.hparams import HyperParameters, inverse_sqrt, override_freq_base, swa_rope, with_window
from llamado.models.keys import Keys
from llamado.models.parts.attention import QkNorm

_LAYERS_OF_27B = 62


class Gemma3Model(GemmaModel):
    """Pre- and post-norms of both blocks, query and key norms, and GEGLU networks."""

    norms = PRE_AND_POST_NORMS
    qk_norm = QkNorm.HEADS

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        hp = replace(
            hp,
            # Files made by Ollama may call the two bases "global" and "local".
            rope=override_freq_base(keys, hp.rope, keys.float_("rope.global.freq_base", hp.rope.freq_base)),
            # Only the 27B model scales by n_embd / n_head instead of the head size.
            attention_scale=inverse_sqrt(hp.n_embd // hp.n_head[0] if hp.n_layer == _LAYERS_OF_27B else hp.head_dim_k),
            final_logit_softcap=keys.float_("final_logit_softcapping", 0.0),
        )
        # Only the global layers use the extended context rope.
        local = swa_rope(keys, hp.rope, freq_base=keys.float_("rope.local.freq_base", 10000.0), freq_scale=1.0)
        return with_window(keys, hp, 6, rope=local, optional=True)
