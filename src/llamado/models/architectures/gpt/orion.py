"""The orion architecture: Orion 14B."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import LayerNormDecoder


class OrionModel(LayerNormDecoder):
    """Llama with layer norms (arXiv 2401.12246)."""

    rope_mode = RopeMode.NEOX
