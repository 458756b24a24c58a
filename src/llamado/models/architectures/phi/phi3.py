"""The phi3 architecture: Phi-3, Phi-3.5, Phi-4, Phi-4-mini."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.parts.feedforward import FUSED_SWIGLU


class Phi3Model(Decoder):
    """Pre-norm decoder with fused query, key and value, and fused gate and up matrices (arXiv 2404.14219).

    A sliding window in the file is ignored, as in llama.cpp.
    """

    rope_mode = RopeMode.NEOX
    scale_queries = True
    feed_forward = FUSED_SWIGLU
