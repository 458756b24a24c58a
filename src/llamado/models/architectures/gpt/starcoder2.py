"""The starcoder2 architecture: StarCoder2."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import LayerNormDecoder
from llamado.models.parts.feedforward import GELU


class StarCoder2Model(LayerNormDecoder):
    """Pre-norm decoder with layer norms, biases everywhere, and GELU networks (arXiv 2402.19173)."""

    rope_mode = RopeMode.NEOX
    feed_forward = GELU
