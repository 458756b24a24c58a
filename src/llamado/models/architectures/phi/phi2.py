"""The phi2 architecture: Phi-1, Phi-1.5, Phi-2."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode, UnaryOp
from llamado.models.decoder import Layer, ParallelDecoder
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.feedforward import UngatedFeedForward
from llamado.models.parts.norms import LayerNorm, Norm
from llamado.models.weights import RoleWeights


class Phi2Model(ParallelDecoder):
    """Parallel attention and feed-forward network after one layer norm, with biases everywhere (arXiv 2309.05463)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        eps = "attention.layer_norm_epsilon"
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX, norm_eps=eps)

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return LayerNorm.take(w, name, n)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        return Layer(
            attn_norm=LayerNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope,
                scale=hp.attention_scale,
                scale_queries=True,
            ),
            feed_forward=UngatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], UnaryOp.GELU),
        )
