"""The talkie architecture: Talkie."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import add, mul
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.parts.attention import Heads, QkNorm
from llamado.models.parts.norms import Norm, RmsNorm, UnitNorm
from llamado.models.weights import RoleWeights, Weights


class TalkieModel(Decoder):
    """Norms without weights, a query factor per head, and a scaled skip connection from the embeddings to each layer.

    The embeddings are normed too.
    """

    rope_mode = RopeMode.NEOX
    qk_norm = QkNorm.HEADS_AFTER_ROPE

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return replace(super()._read_hparams(keys, n_vocab), logit_scale=keys.float_("logit_scale") or 1.0)

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return UnitNorm()

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        layers = (weights.layer(i) for i in range(self.hparams.n_layer))
        self._skips = [w.require("layer_output_scale.weight", 1) for w in layers]

    def _take_qk_norms(self, w: RoleWeights, heads: Heads) -> tuple[Norm | None, Norm | None]:
        return RmsNorm(w.require("attn_q_norm.weight", 1, heads.n)), UnitNorm()

    def _embed(self, step: Pass) -> Tensor:
        return UnitNorm()(step, super()._embed(step), "inp_norm")

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        embedded = step.shared("inp_skip", lambda: x)
        y = super()._layer(step, layer, x)
        if y is None:
            return None
        (embedded,) = step.keep_outputs(layer, embedded)
        return add(y, mul(embedded, self._skips[layer]), f"l_out-{layer}")
