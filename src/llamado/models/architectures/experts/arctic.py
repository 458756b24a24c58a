"""The arctic architecture: Snowflake Arctic."""

from __future__ import annotations

from llamado.ggml.graph import add
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder
from llamado.models.forward import Pass
from llamado.models.hparams import RouterKind
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights, Weights


class ArcticModel(Decoder):
    """Llama with a mixture of experts parallel to each layer, on a norm of the layer's input."""

    router = RouterKind(normalized=True)

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        hp, layers = self.hparams, [weights.layer(i) for i in range(self.hparams.n_layer)]
        assert hp.experts is not None
        self._parallel_experts = [
            (RmsNorm.take(w, "ffn_norm_exps", hp.n_embd), Mixture.take(w, hp.n_embd, hp.experts)) for w in layers
        ]

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return self.feed_forward.take(w, self.hparams.n_embd, self.hparams.n_embd)

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        y = super()._layer(step, layer, x)
        if y is None:
            return None
        norm, mixture = self._parallel_experts[layer]
        (x,) = step.keep_outputs(layer, x)
        return add(mixture(step, layer, norm(step, x, f"ffn_norm_exps-{layer}")), y, f"l_out-{layer}")
