"""The lfm2moe architecture: LFM2's mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.liquid.lfm2 import Lfm2Model
from llamado.models.hparams import HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class Lfm2MoeModel(Lfm2Model):
    """LFM2 with a mixture of experts after the dense first layers."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = self._read_plain(keys, n_vocab)
        return replace(hp, experts=replace(read_experts(keys, hp.n_ff[0], from_file=True), normalized=True))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        experts = self.hparams.experts
        assert experts is not None
        if layer < experts.n_dense_layers:
            return super()._take_feed_forward(w, layer)
        return Mixture.take(w, self.hparams.n_embd, experts)
