"""The bert architecture: MiniLM, BGE, E5, GTE …, and rerankers with a classifier."""

from __future__ import annotations

from llamado.ggml.ops import UnaryOp
from llamado.models.encoder import PostNormEncoder, PostNormLayer
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.feedforward import UngatedFeedForward
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights, Weights


class BertModel(PostNormEncoder):
    """Post-norm encoder with learned positions and GELU feed-forward networks (arXiv 1810.04805)."""

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._positions = weights.input.require("position_embd.weight", hp.n_embd, hp.n_ctx_train)
        super()._take_weights(weights)

    def _take_layer(self, w: RoleWeights, layer: int) -> PostNormLayer:
        hp = self.hparams
        return PostNormLayer(
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=None,
                scale=hp.attention_scale,
            ),
            attn_norm=LayerNorm.take(w, "attn_output_norm", hp.n_embd),
            feed_forward=UngatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], UnaryOp.GELU),
            out_norm=LayerNorm.take(w, "layer_output_norm", hp.n_embd),
        )
