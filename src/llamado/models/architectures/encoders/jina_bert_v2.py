"""The jina-bert-v2 architecture: jina-embeddings-v2, jina-reranker-v1."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import add
from llamado.ggml.ops import GluOp, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.encoder import PostNormEncoder, PostNormLayer
from llamado.models.forward import Pass
from llamado.models.parts.attention import Attention, Heads
from llamado.models.parts.feedforward import FeedForward, FusedGatedFeedForward, GatedFeedForward, UngatedFeedForward
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights, Weights

_MAX_BIAS = 8.0


class JinaBertV2Model(PostNormEncoder):
    """BERT with ALiBi in place of positions, and GEGLU networks (arXiv 2310.19923).

    The models for code have layer norms of whole query and key rows, and a second norm after attention.
    """

    def _take_classifier(self, weights: Weights) -> None:
        if weights.has("cls.weight"):
            self._n_scores = 1
            self._dense = weights.output.linear("cls", self.hparams.n_embd, 1)

    def _take_layer(self, w: RoleWeights, layer: int) -> PostNormLayer:
        if w.has("attn_norm_2.weight"):
            self._second_norms[layer] = LayerNorm.take(w, "attn_norm_2", self.hparams.n_embd)
        return super()._take_layer(w, layer)

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        heads = Heads.of(self.hparams, layer)
        return replace(
            super()._take_attention(w, layer),
            q_norm=_norm(w, "attn_q_norm", heads.n * heads.dim_k),
            k_norm=_norm(w, "attn_k_norm", heads.n_kv * heads.dim_k),
            norm_rows=True,
            max_bias=_MAX_BIAS,
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        n_embd, n_ff = self.hparams.n_embd, self.hparams.n_ff[layer]
        if w.has("ffn_gate.weight"):
            return GatedFeedForward.take(w, n_embd, n_ff, GluOp.GEGLU)
        if w.ne("ffn_up.weight")[1] == 2 * n_ff:
            return FusedGatedFeedForward.take(w, n_embd, n_ff, GluOp.GEGLU)
        return UngatedFeedForward.take(w, n_embd, n_ff, UnaryOp.GELU)

    def _take_weights(self, weights: Weights) -> None:
        self._second_norms: dict[int, LayerNorm] = {}
        super()._take_weights(weights)

    def _between(self, step: Pass, layer: int, h: Tensor, x: Tensor) -> Tensor:
        second = self._second_norms.get(layer)
        return h if second is None else second(step, add(h, x), f"ffn_inp_2-{layer}")


def _norm(w: RoleWeights, name: str, n: int) -> LayerNorm | None:
    return LayerNorm.take(w, name, n) if w.has(f"{name}.weight") else None
