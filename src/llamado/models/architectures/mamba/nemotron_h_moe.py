"""The nemotron_h_moe architecture: Nemotron 3 Nano and Super."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import UnaryOp
from llamado.models.architectures.mamba.nemotron_h import NemotronHModel
from llamado.models.forward import Linear
from llamado.models.hparams import Experts, Gating, HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, UngatedFeedForward
from llamado.models.parts.latent_experts import LatentMixture
from llamado.models.weights import RoleWeights


class NemotronHMoeModel(NemotronHModel):
    """Nemotron-H with experts in place of feed-forward networks; number and width are given per layer."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        n_blocks = keys.int_("block_count")
        self._n_used = keys.of_layers(keys.per_layer("expert_used_count", n_blocks))
        self._widths = keys.per_layer("expert_feed_forward_length", n_blocks, hp.n_ff)
        self._latent = keys.int_("moe_latent_size", 0) or hp.n_embd
        experts = read_experts(keys, max(hp.n_ff), gating=Gating.SIGMOID, from_file=True, per_layer=True)
        return replace(hp, experts=replace(experts, gating=Gating.SIGMOID))

    def _experts(self, layer: int) -> Experts:
        assert self.hparams.experts is not None
        n_used = self._n_used[layer]
        return replace(
            self.hparams.experts, n_used=n_used, n_ff=self._widths[layer] or self.hparams.n_ff[layer] // max(n_used, 1)
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp, experts = self.hparams, self._experts(layer)
        relu, n = UnaryOp.RELU, self._latent

        def projection(name: str, n_in: int, n_out: int) -> Linear | None:
            is_needed = n != hp.n_embd or w.has(f"{name}.weight")
            return w.linear(name, n_in, n_out) if is_needed else None

        return LatentMixture(
            Mixture.take(w, n, experts, relu, squared=True, router_width=hp.n_embd),
            UngatedFeedForward.take(w, hp.n_embd, experts.n_ff_shared, relu, squared=True, suffix="_shexp"),
            projection("ffn_latent_down", hp.n_embd, n),
            projection("ffn_latent_up", n, hp.n_embd),
        )
