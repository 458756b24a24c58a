"""The ernie4_5-moe architecture: the mixtures of experts of ERNIE 4.5."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.ernie.ernie4_5 import Ernie45Model
from llamado.models.errors import UnsupportedModel
from llamado.models.hparams import HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.weights import RoleWeights


class Ernie45MoeModel(Ernie45Model):
    """ERNIE 4.5 with a mixture of experts and a shared expert after the dense first layers."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        if keys.int_("interleave_moe_layer_step") != 1:
            raise UnsupportedModel(
                f"metadata key '{keys.name('interleave_moe_layer_step')}' is "
                f"{keys.int_('interleave_moe_layer_step')}; only 1, experts in every layer, is supported"
            )
        return replace(hp, experts=read_experts(keys, hp.n_ff[0], normalized=True))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        n_embd, experts = self.hparams.n_embd, self.hparams.experts
        assert experts is not None
        if layer < experts.n_dense_layers:
            return super()._take_feed_forward(w, layer)
        shared = GatedFeedForward.take(w, n_embd, experts.n_ff_shared, suffix="_shexp") if experts.n_ff_shared else None
        return Mixture.take(w, n_embd, experts, shared=shared)
