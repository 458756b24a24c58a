"""The qwen3moe architecture: the mixtures of experts of Qwen3, including Qwen3-Coder-30B-A3B."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.qwen.qwen3 import Qwen3Model
from llamado.models.hparams import HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class Qwen3MoeModel(Qwen3Model):
    """Qwen3 with a mixture of experts in each layer, with softmax routing and normalized weights."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        used = keys.int_("expert_used_count")
        return replace(hp, experts=read_experts(keys, hp.n_ff[0] // max(used, 1), normalized=True))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        assert self.hparams.experts is not None
        return Mixture.take(w, self.hparams.n_embd, self.hparams.experts)
