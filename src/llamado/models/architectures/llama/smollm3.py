"""The smollm3 architecture: SmolLM3."""

from __future__ import annotations

from llamado.models.decoder import Decoder
from llamado.models.hparams import Rope

_NO_POSITIONS_STEP = 4


class SmolLm3Model(Decoder):
    """Llama without positions in every fourth layer (NoPE, arXiv 2501.18795)."""

    def _layer_rope(self, layer: int) -> Rope | None:
        return self.hparams.rope if (layer + 1) % _NO_POSITIONS_STEP else None
