"""The cohere2moe architecture: Cohere's mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamado.ggml.graph import scale
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Layer, ParallelDecoder
from llamado.models.forward import Pass
from llamado.models.hparams import Gating, HyperParameters, read_experts, read_hparams, read_swa_layers
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention
from llamado.models.parts.experts import Mixture, take_experts
from llamado.models.parts.feedforward import FeedForward
from llamado.models.parts.norms import LayerNorm, Norm, RmsNorm
from llamado.models.weights import RoleWeights


class Cohere2MoeModel(ParallelDecoder):
    """Cohere 2 with dense first layers, then a mixture of experts with a shared expert.

    The dense layers use rotary positions even with full attention. The norms are RMS or layer norms, depending on which
    epsilon the file has.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        rms = "attention.layer_norm_rms_epsilon"
        self._rms = keys.float_(rms, 0.0) > 0
        eps = rms if self._rms else "attention.layer_norm_epsilon"
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=self.rope_mode, norm_eps=eps)
        return replace(
            hp,
            logit_scale=keys.float_("logit_scale") or 1.0,
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=keys.of_layers(read_swa_layers(keys, keys.int_("block_count"), 4, dense_first=True)),
            experts=read_experts(keys, hp.n_ff[0], gating=Gating.SIGMOID, from_file=True),
        )

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return RmsNorm.take(w, name, n) if self._rms else LayerNorm.take(w, name, n, biased=False)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        return Layer(
            attn_norm=self._take_norm(w, "attn_norm", self.hparams.n_embd),
            attention=self._take_attention(w, layer),
            feed_forward=self._take_feed_forward(w, layer),
        )

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        hp, attention = self.hparams, super()._take_attention(w, layer)
        assert hp.experts is not None
        return attention if hp.is_swa(layer) or layer < hp.experts.n_dense_layers else replace(attention, rope=None)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        network = take_experts(w, self.hparams, layer)
        return _HalvedMixture(network) if isinstance(network, Mixture) and network.shared is not None else network


class _HalvedMixture(NamedTuple):
    """Half the sum of the routed and the shared expert."""

    both: Mixture

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        return scale(self.both(step, layer, x), 0.5)
