"""The granite_swa architecture: Granite with sliding windows."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.granite.granite import GraniteModel
from llamado.models.hparams import (
    HyperParameters,
    read_experts,
    read_swa_layers,
)
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, FusedGatedFeedForward
from llamado.models.weights import RoleWeights


class GraniteSwaModel(GraniteModel):
    """Granite with attention sinks, sliding-window layers, optional layers without positions, and optional experts."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._rotated = keys.metadata.bools(keys.name("attention.rope_pattern"), (True,) * hp.n_layer, n=hp.n_layer)
        return replace(
            hp,
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=read_swa_layers(keys, hp.n_layer, 0),
            experts=read_experts(keys, hp.n_ff[0], normalized=True) if keys.has_experts() else None,
        )

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        hp = self.hparams
        return replace(
            super()._take_attention(w, layer),
            rope=hp.rope if self._rotated[layer] else None,
            sinks=w.require("attn_sinks.weight", hp.n_head[layer]),
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        n_embd, experts = self.hparams.n_embd, self.hparams.experts
        if experts is None:
            return super()._take_feed_forward(w, layer)
        shared = (
            FusedGatedFeedForward.take(w, n_embd, experts.n_ff_shared, suffix="_shexp") if experts.n_ff_shared else None
        )
        return Mixture.take(w, n_embd, experts, shared=shared)
