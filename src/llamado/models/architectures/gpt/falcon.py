"""The falcon architecture: Falcon 7B, 40B, 180B, Falcon 2."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import ONE_NORM, LayerNormDecoder, NormNames, ParallelDecoder
from llamado.models.parts.feedforward import GELU
from llamado.models.weights import RoleWeights


class FalconModel(LayerNormDecoder, ParallelDecoder):
    """Parallel attention and feed-forward network after one or two layer norms; multi-query attention.

    Described in arXiv 2311.16867.
    """

    rope_mode = RopeMode.NEOX
    feed_forward = GELU

    def _norm_names(self, w: RoleWeights, layer: int) -> NormNames:
        # With two norms, the second is that of attention, the first that of the feed-forward network.
        return NormNames("attn_norm_2", "attn_norm") if w.has("attn_norm_2.weight") else ONE_NORM
