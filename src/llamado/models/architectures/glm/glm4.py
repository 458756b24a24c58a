"""The glm4 architecture: GLM-4-0414 and GLM-Z1."""

from __future__ import annotations

from llamado.models.decoder import PRE_AND_POST_NORMS, Decoder
from llamado.models.parts.feedforward import FUSED_SWIGLU


class Glm4Model(Decoder):
    """Pre- and post-norms of both blocks, and partially rotated heads (arXiv 2406.12793)."""

    has_mrope = True
    norms = PRE_AND_POST_NORMS
    feed_forward = FUSED_SWIGLU
