"""The nomic-bert architecture: nomic-embed-text-v1 and v1.5."""

from __future__ import annotations

from llamado.models.encoder import PostNormEncoder
from llamado.models.parts.feedforward import SWIGLU


class NomicBertModel(PostNormEncoder):
    """BERT with rotary positions and SwiGLU networks (arXiv 2402.01613)."""

    has_rope = True
    feed_forward = SWIGLU
