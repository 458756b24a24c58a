"""The olmo architecture: the first OLMo."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import LayerNormDecoder
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.parts.norms import Norm, UnitLayerNorm
from llamado.models.weights import RoleWeights


class OlmoModel(LayerNormDecoder):
    """Llama with layer norms without weights, and clamped queries, keys and values (arXiv 2402.00838)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return replace(super()._read_hparams(keys, n_vocab), clamp_kqv=keys.float_("attention.clamp_kqv", 0.0))

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return UnitLayerNorm()
