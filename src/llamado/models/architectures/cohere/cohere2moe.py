"""The cohere2moe architecture: Cohere's mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamado.ggml.graph import scale
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import ONE_NORM, ParallelDecoder
from llamado.models.forward import Pass
from llamado.models.hparams import Gating, HyperParameters, Rope, RouterKind, read_swa_layers
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward
from llamado.models.parts.norms import LayerNorm, Norm, RmsNorm
from llamado.models.weights import RoleWeights


class Cohere2MoeModel(ParallelDecoder):
    """Cohere 2 with dense first layers, then a mixture of experts with a shared expert.

    The dense layers use rotary positions even with full attention. The norms are RMS or layer norms, depending on which
    epsilon the file has.
    """

    norms = ONE_NORM
    router = RouterKind(Gating.SIGMOID, from_file=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._rms = keys.float_("attention.layer_norm_rms_epsilon", 0.0) > 0
        if not self._rms:
            self.norm_eps = "attention.layer_norm_epsilon"
        return replace(
            super()._read_hparams(keys, n_vocab),
            logit_scale=keys.float_("logit_scale") or 1.0,
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=keys.of_layers(read_swa_layers(keys, keys.int_("block_count"), 4, dense_first=True)),
        )

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return RmsNorm.take(w, name, n) if self._rms else LayerNorm.take(w, name, n, biased=False)

    def _layer_rope(self, layer: int) -> Rope | None:
        hp = self.hparams
        assert hp.experts is not None
        return hp.rope if hp.is_swa(layer) or layer < hp.experts.n_dense_layers else None

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        network = super()._take_feed_forward(w, layer)
        return _HalvedMixture(network) if isinstance(network, Mixture) and network.shared is not None else network


class _HalvedMixture(NamedTuple):
    """Half the sum of the routed and the shared expert."""

    both: Mixture

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        return scale(self.both(step, layer, x), 0.5)
