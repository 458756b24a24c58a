"""The plamo3 architecture: PLaMo 3."""

from __future__ import annotations

from llamado.models.architectures.qwen.qwen3 import Qwen3Model
from llamado.models.decoder import PRE_AND_POST_NORMS
from llamado.models.hparams import HyperParameters, swa_rope, with_window
from llamado.models.keys import Keys
from llamado.models.parts.feedforward import FUSED_SWIGLU
from llamado.models.parts.norms import Norm, RmsNorm
from llamado.models.weights import RoleWeights


class Plamo3Model(Qwen3Model):
    """Qwen3 with post-norms of both blocks, and a sliding window in seven of eight layers."""

    norms = PRE_AND_POST_NORMS
    feed_forward = FUSED_SWIGLU

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        rope = swa_rope(keys, hp.rope, freq_base=10000.0, freq_scale=1.0)
        return with_window(keys, hp, 8, rope=rope, optional=True)

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        # The names of post-norms have no `.weight` suffix.
        return RmsNorm(w.require(name, n)) if name.startswith("post_") else super()._take_norm(w, name, n)
