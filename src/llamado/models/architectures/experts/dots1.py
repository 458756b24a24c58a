"""The dots1 architecture: dots.llm1; also bailingmoe2 and hy_v3, which use the same file layout."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.qwen.qwen3 import Qwen3Model
from llamado.models.hparams import Gating, HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.experts import take_experts
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class Dots1Model(Qwen3Model):
    """Qwen3 with a mixture of experts and a shared expert after the dense first layers (arXiv 2506.05767).

    RouterKind is by sigmoid unless the file says otherwise.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(hp, experts=read_experts(keys, hp.n_ff[0], gating=Gating.SIGMOID, from_file=True))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return take_experts(w, self.hparams, layer)
