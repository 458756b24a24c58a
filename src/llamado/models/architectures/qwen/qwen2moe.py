"""The qwen2moe architecture: the mixtures of experts of Qwen1.5 and Qwen2."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.qwen.qwen2 import Qwen2Model
from llamado.models.hparams import HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.weights import RoleWeights


class Qwen2MoeModel(Qwen2Model):
    """Qwen2 with a mixture of experts and a gated shared expert."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        used = keys.int_("expert_used_count")
        return replace(hp, experts=read_experts(keys, hp.n_ff[0] // max(used, 1)))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp = self.hparams
        assert hp.experts is not None
        shared = GatedFeedForward.take(w, hp.n_embd, hp.experts.n_ff_shared or hp.n_ff[layer], suffix="_shexp")
        gate = w.require("ffn_gate_inp_shexp.weight", hp.n_embd)
        return Mixture.take(w, hp.n_embd, hp.experts, shared=shared, shared_gate=gate)
