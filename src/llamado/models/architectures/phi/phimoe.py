"""The phimoe architecture: Phi-3.5-MoE."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.hparams import RouterKind
from llamado.models.parts.norms import Norm, RmsNorm
from llamado.models.weights import RoleWeights


class PhiMoeModel(Decoder):
    """Phi-3 with a mixture of experts in each layer, and biases of norms, attention and logits."""

    rope_mode = RopeMode.NEOX
    scale_queries = True
    router = RouterKind(normalized=True)

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return RmsNorm.take(w, name, n, biased=True)
