"""The nemotron architecture: Nemotron-4, Minitron."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import LayerNormDecoder
from llamado.models.parts.feedforward import SQUARED_RELU


class NemotronModel(LayerNormDecoder):
    """Pre-norm decoder with layer norms, half-rotated heads, and squared ReLU networks (arXiv 2402.16819)."""

    rope_mode = RopeMode.NEOX
    feed_forward = SQUARED_RELU
