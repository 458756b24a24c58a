"""The jamba architecture: Jamba, Jamba 1.5, Jamba Reasoning."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import HyperParameters, read_experts, read_hparams
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.experts import take_experts
from llamado.models.parts.feedforward import FeedForward
from llamado.models.parts.mamba import Mamba, StateSpace
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class JambaModel(Decoder):
    """Mamba in most layers, attention without positions in the others, and experts in some (arXiv 2403.19887)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._sizes = StateSpace.read(keys)
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=self.rope_mode, recurrent=True)
        return replace(hp, experts=read_experts(keys, max(hp.n_ff)) if keys.has_experts() else None)

    def layer_memory(self, layer: int) -> LayerMemory:
        return (
            super().layer_memory(layer)
            if self.hparams.n_head_kv[layer]
            else self._sizes.layer_memory(self._sizes.n_inner)
        )

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        attention: Attention | Mamba
        if hp.n_head_kv[layer]:
            attention = Attention(matrices=AttentionMatrices.take(w, hp, layer), scale=hp.attention_scale, rope=None)
        else:
            attention = Mamba.take(w, self._sizes, hp.n_embd)
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=attention,
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=self._take_feed_forward(w, layer),
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return take_experts(w, self.hparams, layer)
