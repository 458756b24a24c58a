"""The qwen2 architecture: Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen and others."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder


class Qwen2Model(Decoder):
    """Llama with biases of queries, keys and values, if the file has them."""

    rope_mode = RopeMode.NEOX
