"""The refact architecture: Refact 1.6B."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import Decoder
from llamado.models.parts.attention import Attention
from llamado.models.weights import RoleWeights


class RefactModel(Decoder):
    """Llama with ALiBi (arXiv 2108.12409) in place of rotary positions."""

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        return replace(super()._take_attention(w, layer), rope=None, max_bias=8.0)
