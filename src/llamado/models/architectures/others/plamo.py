"""The plamo architecture: PLaMo 13B."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Layer, ParallelDecoder
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class PlamoModel(ParallelDecoder):
    """Parallel attention and SwiGLU network after one norm."""

    rope_mode = RopeMode.NEOX

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", self.hparams.n_embd),
            attention=self._take_attention(w, layer),
            feed_forward=self._take_feed_forward(w, layer),
        )
