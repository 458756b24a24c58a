"""The nomic-bert architecture: nomic-embed-text-v1 and v1.5."""

from __future__ import annotations

from llamado.models.encoder import PostNormEncoder, PostNormLayer
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights


class NomicBertModel(PostNormEncoder):
    """BERT with rotary positions and SwiGLU networks (arXiv 2402.01613)."""

    def _take_layer(self, w: RoleWeights, layer: int) -> PostNormLayer:
        hp = self.hparams
        return PostNormLayer(
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope,
                scale=hp.attention_scale,
            ),
            attn_norm=LayerNorm.take(w, "attn_output_norm", hp.n_embd),
            feed_forward=GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer]),
            out_norm=LayerNorm.take(w, "layer_output_norm", hp.n_embd),
        )
