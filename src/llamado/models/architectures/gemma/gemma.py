"""The gemma architecture: Gemma 1 and CodeGemma."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamado.ggml.ops import GluOp, RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class GemmaModel(Decoder):
    """Pre-norm decoder with wide heads and GEGLU networks (arXiv 2403.08295)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        return replace(hp, embedding_scale=float(np.sqrt(np.float32(hp.n_embd))))

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope,
                scale=hp.attention_scale,
                scale_queries=True,
            ),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], GluOp.GEGLU),
        )
