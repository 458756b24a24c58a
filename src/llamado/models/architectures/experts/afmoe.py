"""The afmoe architecture: Arcee's Trinity."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamado.models.architectures.experts.dots1 import Dots1Model
from llamado.models.decoder import Layer
from llamado.models.hparams import HyperParameters, read_swa_layers, swa_rope
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, Heads, OutputGate
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights

_NO_POSITIONS_STEP = 4


class AfMoeModel(Dots1Model):
    """dots.llm1 with gated attention output and post-norms of both blocks.

    Every fourth layer has no positions; the others have a sliding window if the file gives one.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        hp = replace(hp, embedding_scale=float(np.sqrt(np.float32(hp.n_embd))))
        n_swa = keys.int_("attention.sliding_window", 0)
        if not n_swa:
            return hp
        layers = read_swa_layers(keys, hp.n_layer, _NO_POSITIONS_STEP)
        return replace(hp, n_swa=n_swa, swa_layers=layers, rope_swa=swa_rope(keys, hp.rope))

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        n_embd = self.hparams.n_embd
        return (
            super()
            ._take_layer(w, layer)
            ._replace(
                attn_post_norm=RmsNorm.take(w, "post_attention_norm", n_embd),
                ffn_post_norm=RmsNorm.take(w, "post_ffw_norm", n_embd),
            )
        )

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        hp, attention = self.hparams, super()._take_attention(w, layer)
        return replace(
            attention,
            gate=OutputGate.take(w, hp.n_embd, Heads.of(hp, layer)),
            rope=attention.rope if (layer + 1) % _NO_POSITIONS_STEP else None,
        )
