"""The arctic architecture: Snowflake Arctic."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import add
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights, Weights


class ArcticModel(Decoder):
    """Llama with a mixture of experts parallel to each layer, on a norm of the layer's input."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(hp, experts=read_experts(keys, hp.n_ff[0], normalized=True))

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        hp, layers = self.hparams, [weights.layer(i) for i in range(self.hparams.n_layer)]
        assert hp.experts is not None
        self._parallel_experts = [
            (RmsNorm.take(w, "ffn_norm_exps", hp.n_embd), Mixture.take(w, hp.n_embd, hp.experts)) for w in layers
        ]

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return GatedFeedForward.take(w, self.hparams.n_embd, self.hparams.n_embd)

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        y = super()._layer(step, layer, x)
        if y is None:
            return None
        norm, mixture = self._parallel_experts[layer]
        (x,) = step.keep_outputs(layer, x)
        return add(mixture(step, layer, norm(step, x, f"ffn_norm_exps-{layer}")), y, f"l_out-{layer}")
