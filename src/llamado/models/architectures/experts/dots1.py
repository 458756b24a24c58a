"""The dots1 architecture: dots.llm1; and bailingmoe2 and hy_v3, whose files are alike."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.qwen.qwen3 import Qwen3Model
from llamado.models.hparams import Gating, HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.experts import take_experts
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class Dots1Model(Qwen3Model):
    """As Qwen3; behind the first layers a mixture of experts, chosen by sigmoids unless the file says otherwise, beside
    one that every token goes through (arXiv 2506.05767).
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(hp, experts=read_experts(keys, hp.n_ff[0], gating=Gating.SIGMOID, from_file=True))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return take_experts(w, self.hparams, layer)
