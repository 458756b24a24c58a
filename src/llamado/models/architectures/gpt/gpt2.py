"""The gpt2 architecture: GPT-2 and its derivatives."""

from __future__ import annotations

from llamado.ggml.graph import add, get_rows
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import LayerNormDecoder
from llamado.models.forward import Pass
from llamado.models.parts.feedforward import GELU
from llamado.models.weights import Weights


class Gpt2Model(LayerNormDecoder):
    """Pre-norm decoder with learned positions, layer norms, biases everywhere, and GELU networks."""

    has_rope = False
    feed_forward = GELU

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._positions = weights.input.require("position_embd.weight", hp.n_embd, hp.n_ctx_train)
        super()._take_weights(weights)

    def _embed(self, step: Pass) -> Tensor:
        return add(super()._embed(step), get_rows(self._positions, step.positions()), "inp_embd")
