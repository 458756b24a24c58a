"""The minimax-m3 architecture: MiniMax-M3."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import GluOp, RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.hparams import Gating, HyperParameters, read_experts, read_hparams
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory, align
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.blocks import BlockAttention, BlockIndexer, BlockSizes
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class MinimaxM3Model(Decoder):
    """Partially rotated heads with norms; block-sparse attention and experts after the first layers.

    The first layers have full attention and a dense network. The others attend to blocks selected by an indexer, and
    have sigmoid-routed experts with a selection bias, plus shared experts.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        experts = read_experts(keys, hp.n_ff[0], gating=Gating.SIGMOID, from_file=True)
        suffixes = ("head_count", "key_length", "block_size", "top_k", "local_blocks")
        self._indexer = BlockSizes(*(keys.int_(f"attention.indexer.{suffix}") for suffix in suffixes))
        if align(1) % self._indexer.block:
            raise UnsupportedModel(
                f"metadata key '{keys.name('attention.indexer.block_size')}' is {self._indexer.block}; a divisor of "
                f"{align(1)} is expected"
            )
        if set(hp.n_head_kv) != {self._indexer.n_head} or self._indexer.dim < hp.rope.n_dims:
            raise InvalidModel(
                f"metadata keys '{keys.name('attention.indexer.head_count')}' and "
                f"'{keys.name('attention.indexer.key_length')}' are {self._indexer.n_head} and {self._indexer.dim}; as "
                f"many heads as keys have, and at least the {hp.rope.n_dims} elements that are rotated are expected"
            )
        return replace(hp, experts=experts)

    def _is_dense(self, layer: int) -> bool:
        assert self.hparams.experts is not None
        return layer < self.hparams.experts.n_dense_layers

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        matrices = AttentionMatrices.take(w, hp, layer)
        q_norm, k_norm = (RmsNorm.take(w, f"attn_{which}_norm", hp.head_dim_k) for which in "qk")
        attention: Attention | BlockAttention
        if self._is_dense(layer):
            attention = Attention(
                matrices=matrices, scale=hp.attention_scale, rope=hp.rope, q_norm=q_norm, k_norm=k_norm
            )
        else:
            indexer = BlockIndexer.take(w, hp.n_embd, self._indexer, hp.rope)
            attention = BlockAttention(matrices, hp.attention_scale, hp.rope, q_norm, k_norm, indexer)
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=attention,
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=self._take_feed_forward(w, layer),
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp, activation = self.hparams, GluOp.SWIGLU_OAI
        assert hp.experts is not None
        if self._is_dense(layer):
            return GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], activation)
        shared = GatedFeedForward.take(w, hp.n_embd, hp.experts.n_ff * hp.experts.n_shared, activation, suffix="_shexp")
        return Mixture.take(w, hp.n_embd, hp.experts, activation, shared=shared)

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values, and the indexer's key if the layer has one."""
        attention = self._layers[layer].attention
        return attention.layer_memory() if isinstance(attention, BlockAttention) else super().layer_memory(layer)
