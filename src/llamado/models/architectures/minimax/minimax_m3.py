"""The minimax-m3 architecture: MiniMax-M3."""

from __future__ import annotations

from llamado.ggml.ops import GluOp, RopeMode
from llamado.models.decoder import Decoder
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.hparams import Gating, HyperParameters, RouterKind
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory, align
from llamado.models.parts.attention import Mixer, QkNorm
from llamado.models.parts.blocks import BlockAttention, BlockIndexer, BlockSizes
from llamado.models.parts.feedforward import FeedForwardKind
from llamado.models.weights import RoleWeights


class MinimaxM3Model(Decoder):
    """Partially rotated heads with norms; block-sparse attention and experts after the first layers.

    The first layers have full attention and a dense network. The others attend to blocks selected by an indexer, and
    have sigmoid-routed experts with a selection bias, plus shared experts.
    """

    rope_mode = RopeMode.NEOX
    qk_norm = QkNorm.HEADS
    feed_forward = FeedForwardKind(GluOp.SWIGLU_OAI)
    router = RouterKind(Gating.SIGMOID, from_file=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
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
        return hp

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp, found = self.hparams, self._take_attention(w, layer)
        assert hp.experts is not None and found.q_norm is not None and found.k_norm is not None
        if layer < hp.experts.n_dense_layers:
            return found
        indexer = BlockIndexer.take(w, hp.n_embd, self._indexer, hp.rope)
        return BlockAttention(found.matrices, found.scale, hp.rope, found.q_norm, found.k_norm, indexer)

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values, and the indexer's key if the layer has one."""
        attention = self._layers[layer].attention
        return attention.layer_memory() if isinstance(attention, BlockAttention) else super().layer_memory(layer)
