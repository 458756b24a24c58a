"""The nomic-bert architecture: nomic-embed-text-v1 and v1.5."""

from __future__ import annotations

from llamado.models.encoder import PostNormEncoder, PostNormLayer
from llamado.models.parts.attention import Attention, Heads, take_projections
from llamado.models.parts.feedforward import Gated
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights


class NomicBertModel(PostNormEncoder):
    """As BERT, with rotary positions and a SwiGLU network (arXiv 2402.01613)."""

    architecture = "nomic-bert"

    def _take_layer(self, w: RoleWeights, layer: int) -> PostNormLayer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        return PostNormLayer(
            attention=Attention(
                heads=heads,
                project=take_projections(w, hp.n_embd, heads),
                out=w.linear("attn_output", heads.n * heads.dim_v, hp.n_embd),
                rope=hp.rope,
                scale=hp.attention_scale,
            ),
            attn_norm=LayerNorm.take(w, "attn_output_norm", hp.n_embd),
            feed_forward=Gated.take(w, hp.n_embd, hp.n_ff[layer]),
            out_norm=LayerNorm.take(w, "layer_output_norm", hp.n_embd),
        )
