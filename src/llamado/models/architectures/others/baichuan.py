"""The baichuan architecture: Baichuan 1 and 2."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import Decoder
from llamado.models.parts.attention import Attention
from llamado.models.weights import RoleWeights

_LAYERS_OF_7B, _LAYERS_OF_13B = 32, 40


class BaichuanModel(Decoder):
    """As Llama, or in the 13B model with scores that fall with the distance of tokens (ALiBi; arXiv 2309.10305).

    As llama.cpp has it, one of neither's number of layers knows no places.
    """

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        attention, n = super()._take_attention(w, layer), self.hparams.n_layer
        if n == _LAYERS_OF_7B:
            return attention
        return replace(attention, rope=None, max_bias=8.0 if n == _LAYERS_OF_13B else 0.0)
