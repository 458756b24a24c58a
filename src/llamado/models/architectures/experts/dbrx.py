"""The dbrx architecture: DBRX."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Layer, LayerNormDecoder
from llamado.models.hparams import (
    HyperParameters,
    read_experts,
)
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.weights import RoleWeights


class DbrxModel(LayerNormDecoder):
    """Layer norms, clamped queries, keys and values, and a mixture of experts in each layer."""

    rope_mode = RopeMode.NEOX

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._clamp = keys.float_("attention.clamp_kqv")
        hp = super()._read_hparams(keys, n_vocab)
        return replace(hp, experts=read_experts(keys, hp.n_ff[0], normalized=True))

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        assert hp.experts is not None
        return Layer(
            attn_norm=self._take_norm(w, "attn_norm", hp.n_embd),
            attention=replace(self._take_attention(w, layer), clamp=self._clamp),
            # The file's "attention output norm" is the norm before the feed-forward network.
            ffn_norm=self._take_norm(w, "attn_output_norm", hp.n_embd),
            feed_forward=Mixture.take(w, hp.n_embd, hp.experts),
        )
