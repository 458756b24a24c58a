"""The jina-bert-v3 architecture: jina-embeddings-v3."""

from __future__ import annotations

from llamado.ggml.ops import UnaryOp
from llamado.models.encoder import PostNormEncoder, PostNormLayer
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.feedforward import UngatedFeedForward
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights


class JinaBertV3Model(PostNormEncoder):
    """BERT with rotary positions (arXiv 2409.10173)."""

    def _take_layer(self, w: RoleWeights, layer: int) -> PostNormLayer:
        hp = self.hparams
        return PostNormLayer(
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope,
                scale=hp.attention_scale,
            ),
            attn_norm=LayerNorm.take(w, "attn_output_norm", hp.n_embd),
            feed_forward=UngatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], UnaryOp.GELU),
            out_norm=LayerNorm.take(w, "layer_output_norm", hp.n_embd),
        )
