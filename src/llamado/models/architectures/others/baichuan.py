"""The baichuan architecture: Baichuan 1 and 2."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import Decoder
from llamado.models.parts.attention import Attention
from llamado.models.weights import RoleWeights

_LAYERS_OF_7B, _LAYERS_OF_13B = 32, 40


class BaichuanModel(Decoder):
    """Llama; the 13B model has ALiBi in place of rotary positions (arXiv 2309.10305).

    As in llama.cpp, a model with any other number of layers has no positions.
    """

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        attention, n = super()._take_attention(w, layer), self.hparams.n_layer
        if n == _LAYERS_OF_7B:
            return attention
        return replace(attention, rope=None, max_bias=8.0 if n == _LAYERS_OF_13B else 0.0)
