"""The chatglm architecture: ChatGLM3, GLM-4-9B-Chat, GLM-Edge."""

from __future__ import annotations

from llamado.models.decoder import Decoder
from llamado.models.parts.feedforward import FUSED_SWIGLU


class ChatGlmModel(Decoder):
    """Pre-norm decoder that rotates half of each head (arXiv 2406.12793)."""

    feed_forward = FUSED_SWIGLU
