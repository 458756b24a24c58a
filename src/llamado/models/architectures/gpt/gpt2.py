"""The gpt2 architecture: GPT-2 and its derivatives."""

from __future__ import annotations

from llamado.ggml.graph import add, get_rows
from llamado.ggml.ops import RopeMode, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder, Layer
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.feedforward import UngatedFeedForward
from llamado.models.parts.norms import LayerNorm, Norm
from llamado.models.weights import RoleWeights, Weights


class Gpt2Model(Decoder):
    """Pre-norm decoder with learned positions, layer norms, biases everywhere, and GELU networks."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        eps = "attention.layer_norm_epsilon"
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL, norm_eps=eps)

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return LayerNorm.take(w, name, n)

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._positions = weights.input.require("position_embd.weight", hp.n_embd, hp.n_ctx_train)
        super()._take_weights(weights)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        return Layer(
            attn_norm=LayerNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=None,
                scale=hp.attention_scale,
            ),
            ffn_norm=LayerNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=UngatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], UnaryOp.GELU),
        )

    def _embed(self, step: Pass) -> Tensor:
        return add(super()._embed(step), get_rows(self._positions, step.positions()), "inp_embd")
