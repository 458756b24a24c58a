"""The granitemoe architecture: the mixtures of experts of Granite 3 and 4."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.granite.granite import GraniteModel
from llamado.models.hparams import HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.weights import RoleWeights


class GraniteMoeModel(GraniteModel):
    """Granite with a mixture of experts in each layer, in some models with a shared expert."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(hp, experts=read_experts(keys, hp.n_ff[0], normalized=True))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        n_embd, experts = self.hparams.n_embd, self.hparams.experts
        assert experts is not None
        shared = GatedFeedForward.take(w, n_embd, experts.n_ff_shared, suffix="_shexp") if experts.n_ff_shared else None
        return Mixture.take(w, n_embd, experts, shared=shared)
