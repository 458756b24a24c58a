"""The olmo architecture: the first OLMo."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import LayerNormDecoder
from llamado.models.hparams import (
    HyperParameters,
)
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention
from llamado.models.parts.norms import Norm, UnitLayerNorm
from llamado.models.weights import RoleWeights


class OlmoModel(LayerNormDecoder):
    """Llama with layer norms without weights, and clamped queries, keys and values (arXiv 2402.00838)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._clamp = keys.float_("attention.clamp_kqv", 0.0)
        return super()._read_hparams(keys, n_vocab)

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return UnitLayerNorm()

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        return replace(super()._take_attention(w, layer), clamp=self._clamp)
