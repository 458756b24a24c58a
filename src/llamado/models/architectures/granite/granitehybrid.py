"""The granitehybrid architecture: Granite 4, with Mamba-2 in most layers."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.architectures.granite.granite import GraniteModel
from llamado.models.decoder import Layer
from llamado.models.hparams import HyperParameters, read_experts, read_hparams
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.parts.mamba import Mamba2, StateSpace
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class GraniteHybridModel(GraniteModel):
    """Granite with Mamba-2 in the layers without KV heads, and optional experts in all layers."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._sizes = StateSpace.read(keys, grouped=True)
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL, recurrent=True)
        hp = self._with_factors(keys, hp, keys.float_("logit_scale", 0.0))
        return replace(hp, experts=read_experts(keys, hp.n_ff[0], normalized=True) if keys.has_experts() else None)

    def layer_memory(self, layer: int) -> LayerMemory:
        if self.hparams.n_head_kv[layer]:
            return super().layer_memory(layer)
        return self._sizes.layer_memory(self._sizes.n_mixed)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        if hp.n_head_kv[layer]:
            return super()._take_layer(w, layer)
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Mamba2.take(w, self._sizes, hp.n_embd),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=self._take_feed_forward(w, layer),
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        n_embd, experts = self.hparams.n_embd, self.hparams.experts
        if experts is None:
            return super()._take_feed_forward(w, layer)
        shared = GatedFeedForward.take(w, n_embd, experts.n_ff_shared, suffix="_shexp") if experts.n_ff_shared else None
        return Mixture.take(w, n_embd, experts, shared=shared)
