"""The hunyuan-moe architecture: Hunyuan-A13B."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.hunyuan.hunyuan_dense import HunyuanDenseModel
from llamado.models.hparams import HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.weights import RoleWeights


class HunyuanMoeModel(HunyuanDenseModel):
    """Hunyuan with a mixture of experts and a shared expert."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        experts = read_experts(keys, hp.n_ff[0], normalized=True)
        # Experts have the file's dense feed-forward width.
        return replace(hp, experts=replace(experts, n_ff=hp.n_ff[0]))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp = self.hparams
        assert hp.experts is not None
        shared = GatedFeedForward.take(w, hp.n_embd, hp.experts.n_ff_shared or hp.n_ff[layer], suffix="_shexp")
        return Mixture.take(w, hp.n_embd, hp.experts, shared=shared)
