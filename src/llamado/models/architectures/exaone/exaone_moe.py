"""The exaone-moe architecture: K-EXAONE."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.experts.dots1 import Dots1Model
from llamado.models.hparams import HyperParameters, read_swa_layers
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention
from llamado.models.weights import RoleWeights


class ExaoneMoeModel(Dots1Model):
    """dots.llm1 with a sliding window in three of four layers; the fourth has no positions."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        n_swa = keys.int_("attention.sliding_window")
        return replace(hp, n_swa=n_swa, swa_layers=read_swa_layers(keys, hp.n_layer, 4))

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        attention = super()._take_attention(w, layer)
        return attention if self.hparams.is_swa(layer) else replace(attention, rope=None)
