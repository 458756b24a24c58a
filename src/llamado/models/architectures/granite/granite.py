"""The granite architecture: the dense models of Granite 3 and 4."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention
from llamado.models.weights import RoleWeights


class GraniteModel(Decoder):
    """Llama with scale factors of embeddings, attention scores, block outputs and logits.

    A file may turn rotary positions off (`rope.scaling.finetuned` false).
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL)
        return self._with_factors(keys, hp, keys.float_("logit_scale"))

    def _with_factors(self, keys: Keys, hp: HyperParameters, logit_scale: float) -> HyperParameters:
        self._rotates = keys.bool_("rope.scaling.finetuned", True)
        return replace(
            hp,
            embedding_scale=keys.float_("embedding_scale", 0.0) or 1.0,
            attention_scale=keys.float_("attention.scale", 0.0) or hp.attention_scale,
            residual_scale=keys.float_("residual_scale", 0.0) or 1.0,
            # The file holds the divisor of the logits.
            logit_scale=float(np.float32(1) / np.float32(logit_scale or 1.0)),
        )

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        attention = super()._take_attention(w, layer)
        return attention if self._rotates else replace(attention, rope=None)
