"""The falcon architecture: Falcon 7B, 40B, 180B, Falcon 2."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode, UnaryOp
from llamado.models.decoder import Layer, ParallelDecoder
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.feedforward import UngatedFeedForward
from llamado.models.parts.norms import LayerNorm, Norm
from llamado.models.weights import RoleWeights


class FalconModel(ParallelDecoder):
    """Parallel attention and feed-forward network after one or two layer norms; multi-query attention.

    Described in arXiv 2311.16867.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        eps = "attention.layer_norm_epsilon"
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX, norm_eps=eps)

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return LayerNorm.take(w, name, n)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        norm = LayerNorm.take(w, "attn_norm", hp.n_embd)
        # With two norms, the second is that of attention, the first that of the feed-forward network.
        second = LayerNorm.take(w, "attn_norm_2", hp.n_embd) if w.has("attn_norm_2.weight") else None
        return Layer(
            attn_norm=norm if second is None else second,
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope,
                scale=hp.attention_scale,
            ),
            ffn_norm=None if second is None else norm,
            feed_forward=UngatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], UnaryOp.GELU),
        )
