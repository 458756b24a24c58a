"""The qwen2 architecture: Qwen2, Qwen2.5, QwQ and DeepSeek's distillations into them, and others alike."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder


class Qwen2Model(Decoder):
    """As Llama, with biases where the file has them: of queries, keys and values."""

    rope_mode = RopeMode.NEOX
