"""The phi2 architecture: Phi-1, Phi-1.5, Phi-2."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import ONE_NORM, LayerNormDecoder, ParallelDecoder
from llamado.models.parts.feedforward import GELU


class Phi2Model(LayerNormDecoder, ParallelDecoder):
    """Parallel attention and feed-forward network after one layer norm, with biases everywhere (arXiv 2309.05463)."""

    rope_mode = RopeMode.NEOX
    norms = ONE_NORM
    scale_queries = True
    feed_forward = GELU
