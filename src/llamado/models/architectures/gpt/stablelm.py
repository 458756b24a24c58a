"""The stablelm architecture: StableLM 3B, StableLM 2, Stable Code."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder, Layer, ParallelDecoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import LayerNorm, Norm, take_head_norm
from llamado.models.weights import RoleWeights


class StableLmModel(ParallelDecoder):
    """Pre-norm decoder with layer norms and heads rotated by a quarter (arXiv 2402.17834).

    The largest model has one norm per layer, parallel attention and feed-forward network, and query and key norms.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        eps = "attention.layer_norm_epsilon"
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX, norm_eps=eps)

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return LayerNorm.take(w, name, n)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        return Layer(
            attn_norm=LayerNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                q_norm=take_head_norm(w, "attn_q_norm", heads.dim_k, heads.n),
                k_norm=take_head_norm(w, "attn_k_norm", heads.dim_k, heads.n_kv),
                rope=hp.rope,
                scale=hp.attention_scale,
            ),
            ffn_norm=LayerNorm.take(w, "ffn_norm", hp.n_embd) if w.has("ffn_norm.weight") else None,
            feed_forward=GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer]),
        )

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        order = ParallelDecoder if self._layers[layer].ffn_norm is None else Decoder
        return order._layer(self, step, layer, x)
