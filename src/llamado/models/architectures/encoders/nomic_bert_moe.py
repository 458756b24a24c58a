"""The nomic-bert-moe architecture: nomic-embed-text-v2-moe."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import UnaryOp
from llamado.models.encoder import PostNormEncoder, PostNormLayer
from llamado.models.hparams import HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, UngatedFeedForward
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights


class NomicBertMoeModel(PostNormEncoder):
    """BERT with rotary positions, and experts in every other layer (arXiv 2502.07972)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._step = keys.int_("moe_every_n_layers", 0)
        return replace(hp, experts=read_experts(keys, hp.n_ff[0])) if self._step > 1 else hp

    def _take_layer(self, w: RoleWeights, layer: int) -> PostNormLayer:
        hp = self.hparams
        return PostNormLayer(
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope,
                scale=hp.attention_scale,
            ),
            attn_norm=LayerNorm.take(w, "attn_output_norm", hp.n_embd),
            feed_forward=self._take_network(w, layer),
            out_norm=LayerNorm.take(w, "layer_output_norm", hp.n_embd),
        )

    def _take_network(self, w: RoleWeights, layer: int) -> FeedForward:
        hp = self.hparams
        if hp.experts is not None and layer % self._step == 1:
            return Mixture.take(w, hp.n_embd, hp.experts, UnaryOp.GELU)
        return UngatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], UnaryOp.GELU)
