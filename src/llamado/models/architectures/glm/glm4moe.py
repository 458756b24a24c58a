"""The glm4moe architecture: GLM-4.5, 4.6 and 4.7, their Air models, Solar Open (arXiv 2508.06471)."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import POST_ATTENTION_NORM_BEFORE_FFN, Decoder
from llamado.models.hparams import Gating, RouterKind
from llamado.models.parts.attention import Heads, QkNorm
from llamado.models.parts.norms import Norm
from llamado.models.weights import RoleWeights


class Glm4MoeModel(Decoder):
    """Partially rotated heads; a mixture of experts with shared experts after the dense first layers.

    RouterKind is by sigmoid with a selection bias. Some models have query and key norms.
    """

    rope_mode = RopeMode.NEOX
    has_mrope = True
    norms = POST_ATTENTION_NORM_BEFORE_FFN
    router = RouterKind(Gating.SIGMOID, from_file=True, split_width=True)

    def _take_qk_norms(self, w: RoleWeights, heads: Heads) -> tuple[Norm | None, Norm | None]:
        return (QkNorm.HEADS if w.has("attn_q_norm.weight") else QkNorm.NONE).take(w, heads)
