"""The nanbeige architecture: looped Nanbeige models."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder, take_factors
from llamado.models.errors import InvalidModel
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters
from llamado.models.keys import MOST_LAYERS, Keys
from llamado.models.weights import Weights


class NanbeigeModel(Decoder):
    """Llama whose layers run `num_loops` times, each time with separate keys and values.

    The output norm is applied between loops, unless the file disables it.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        n = keys.int_("num_loops", 1)
        self._n_blocks = hp.n_layer
        self._norms_between = not keys.bool_("skip_loop_final_norm", False)
        if n * hp.n_layer > MOST_LAYERS:
            raise InvalidModel(
                f"metadata key '{keys.name('num_loops')}' is {n} for {hp.n_layer} layers; up to {MOST_LAYERS} are "
                "possible in all"
            )
        return replace(
            hp,
            n_layer=n * hp.n_layer,
            n_head=n * hp.n_head,
            n_head_kv=n * hp.n_head_kv,
            n_ff=n * hp.n_ff,
            attention_scale=keys.float_("attention.scale", 0.0) or hp.attention_scale,
        )

    def _take_weights(self, weights: Weights) -> None:
        hp, n = self.hparams, self._n_blocks
        self._freq_factors = take_factors(weights, hp.rope.n_dims // 2)
        self._layers = [self._take_layer(weights.layer(i, block=i % n), i) for i in range(hp.n_layer)]

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        y = super()._layer(step, layer, x)
        if y is None or not self._norms_between or (layer + 1) % self._n_blocks or layer + 1 == self.hparams.n_layer:
            return y
        return self._output_norm(step, y, f"loop_norm-{layer}")
