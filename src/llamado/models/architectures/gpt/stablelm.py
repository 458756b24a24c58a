"""The stablelm architecture: StableLM 3B, StableLM 2, Stable Code."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import ONE_NORM, Decoder, LayerNormDecoder, NormNames, ParallelDecoder
from llamado.models.forward import Pass
from llamado.models.parts.attention import Heads
from llamado.models.parts.norms import Norm, take_head_norms
from llamado.models.weights import RoleWeights


class StableLmModel(LayerNormDecoder, ParallelDecoder):
    """Pre-norm decoder with layer norms and heads rotated by a quarter (arXiv 2402.17834).

    The largest model has one norm per layer, parallel attention and feed-forward network, and query and key norms.
    """

    rope_mode = RopeMode.NEOX

    def _norm_names(self, w: RoleWeights, layer: int) -> NormNames:
        return self.norms if w.has("ffn_norm.weight") else ONE_NORM

    def _take_qk_norms(self, w: RoleWeights, heads: Heads) -> tuple[Norm | None, Norm | None]:
        return take_head_norms(w, heads.dim_k, heads.n, heads.n_kv)

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        order = ParallelDecoder if self._layers[layer].ffn_norm is None else Decoder
        return order._layer(self, step, layer, x)
