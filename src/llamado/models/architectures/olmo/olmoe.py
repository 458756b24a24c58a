"""The olmoe architecture: OLMoE (arXiv 2409.02060)."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.hparams import RouterKind
from llamado.models.parts.attention import QkNorm


class OlmoeModel(Decoder):
    """Llama with norms of whole query and key rows, and a mixture of experts in each layer."""

    rope_mode = RopeMode.NEOX
    qk_norm = QkNorm.ROWS
    router = RouterKind()
