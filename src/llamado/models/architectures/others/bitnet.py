"""The bitnet architecture: BitNet b1.58."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.ops import GluOp, RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder, Layer
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads, take_projections
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class NormedLinear(NamedTuple):
    """A norm followed by a matrix."""

    norm: RmsNorm
    linear: Linear

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        return self.linear(step, self.norm(step, x, f"{name}_sub_norm"), name)


class BitNetModel(Decoder):
    """Llama with an additional norm before the output matrix of each block (arXiv 2402.17764)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        n_ff = hp.n_ff[layer]
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices(
                    heads,
                    take_projections(w, hp.n_embd, heads),
                    NormedLinear(
                        RmsNorm.take(w, "attn_sub_norm", hp.n_embd),
                        w.linear("attn_output", heads.n * heads.dim_v, hp.n_embd),
                    ),
                ),
                rope=hp.rope,
                scale=hp.attention_scale,
            ),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=GatedFeedForward(
                gate=w.linear("ffn_gate", hp.n_embd, n_ff),
                up=w.linear("ffn_up", hp.n_embd, n_ff),
                down=NormedLinear(RmsNorm.take(w, "ffn_sub_norm", n_ff), w.linear("ffn_down", n_ff, hp.n_embd)),
                activation=GluOp.SWIGLU,
            ),
        )
