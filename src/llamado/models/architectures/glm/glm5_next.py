"""The glm5-next architecture: GLM-5.3 Flash."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import scale
from llamado.ggml.ops import GluOp
from llamado.ggml.tensor import Tensor
from llamado.models.architectures.moonshot.kimi_linear import KimiLinearModel
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.forward import Pass
from llamado.models.hparams import Gating, HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.memory.pool import ALIGN
from llamado.models.parts.attention import Mixer
from llamado.models.parts.experts import Mixture, add_up
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.parts.indexer import IndexerSizes, SparseAttention
from llamado.models.parts.latent import LatentAttention, LatentProjection
from llamado.models.parts.pooled_indexer import PooledIndexer
from llamado.models.parts.recurrent.kimi_delta import KimiDelta
from llamado.models.parts.streams.hyper_connections import ConnectionSizes, HyperConnections, add_output
from llamado.models.parts.streams.spread import spread
from llamado.models.weights import RoleWeights, Weights

_DELTA_EPS = 1e-6


class Glm5NextModel(KimiLinearModel):
    """KDA and latent attention without positions, hyper-connections, and an indexer over runs of tokens.

    The residual consists of four streams, mixed by each block.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        n_blocks = hp.n_layer + hp.n_nextn
        self._bound = keys.float_("kda.gate_lower_bound", 0.0)
        self._q_rank = keys.int_("attention.q_lora_rank")
        self._norm_eps = keys.float_("attention.layer_norm_epsilon", 0.0)
        self._limits = keys.floats_per_layer("swiglu_clamp_exp", n_blocks, 0.0)
        shared = keys.has("swiglu_clamp_shexp")
        self._shared_limits = keys.floats_per_layer("swiglu_clamp_shexp", n_blocks) if shared else self._limits
        self._connections = ConnectionSizes.read(keys)
        self._indexer = IndexerSizes.read(keys)
        self._pool = keys.int_("attention.indexer.kpool")
        self._tail = keys.bool_("attention.indexer.kpool_select_tail", False)
        if ALIGN % self._pool or self._indexer.n_chosen % self._pool or self._indexer.dim % self._pool:
            raise UnsupportedModel(
                f"metadata key '{keys.name('attention.indexer.kpool')}' is {self._pool}; a divisor of {ALIGN}, of "
                f"'{keys.name('attention.indexer.top_k')}' and of the indexer's key_length is expected"
            )
        if all(hp.n_head_kv):
            raise UnsupportedModel(
                f"metadata key '{keys.name('attention.head_count_kv')}' leaves no layer with recurrent state"
            )
        if hp.rope.n_dims:
            raise InvalidModel(f"metadata key '{keys.name('rope.dimension_count')}' is {hp.rope.n_dims}; 0 is expected")
        self._indexed = self._read_indexed(keys, hp)
        return replace(hp, experts=read_experts(keys, hp.n_ff[0], gating=Gating.SIGMOID, from_file=True))

    def _read_indexed(self, keys: Keys, hp: HyperParameters) -> tuple[bool, ...]:
        """Return which layers have an indexer of their own; others use the selection of the one before."""
        name = keys.name("attention.indexer.types")
        whole = keys.metadata.bools(name, n=hp.n_layer) if name in keys.metadata else (True,) * hp.n_layer
        found = tuple(own and n > 0 for own, n in zip(whole, hp.n_head_kv, strict=True))
        first = next((i for i, n in enumerate(hp.n_head_kv) if n), None)
        if first is not None and not found[first]:
            raise InvalidModel(f"metadata key '{name}' gives the first layer with attention no indexer")
        return found

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        n_embd, layers = self.hparams.n_embd, range(self.hparams.n_layer)
        self._around_attention, self._around_network = (
            [HyperConnections.take(weights.layer(i), name, n_embd, self._connections) for i in layers]
            for name in ("hc_attn", "hc_ffn")
        )

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        found = super()._take_mixer(w, layer)
        if not isinstance(found, LatentAttention):
            return found
        hp, indexer = self.hparams, None
        if self._indexed[layer]:
            sizes = self._indexer
            indexer = PooledIndexer.take(w, hp.n_embd, self._q_rank, sizes, self._pool, self._norm_eps, tail=self._tail)
        else:  # files may have indexer tensors in all layers
            names = ("attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight")
            w.ignore(*(f"indexer.{name}" for name in names))
            w.ignore("indexer_compressor_gate.weight", "indexer_compressor_ape.weight")
        owner = max(i for i in range(layer + 1) if self._indexed[i])
        all_up_to = self._indexer.n_chosen if self._tail else 0
        return SparseAttention(found, indexer, owner, all_up_to)

    def _take_delta(self, w: RoleWeights) -> KimiDelta:
        n_embd, n_head = self.hparams.n_embd, self._sizes.n_head
        return KimiDelta.take(w, n_embd, self._state, n_head, self._kernel, self._bound, negative=True, eps=_DELTA_EPS)

    def _take_latent(self, w: RoleWeights) -> Mixer:
        hp = self.hparams
        compressed = LatentProjection.take(w, hp.n_embd, self._sizes, self._q_rank, None)
        return LatentAttention.take(w, hp.n_embd, compressed, hp.attention_scale)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp, limit, act = self.hparams, self._shared_limits[layer], GluOp.SWIGLU_CLAMP
        assert hp.experts is not None
        if layer < hp.experts.n_dense_layers:
            return GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], act)._replace(limit=limit)
        n_shared = hp.experts.n_ff * hp.experts.n_shared
        shared = GatedFeedForward.take(w, hp.n_embd, n_shared, act, suffix="_shexp")._replace(limit=limit)
        return Mixture.take(w, hp.n_embd, hp.experts, act, shared=shared, limit=self._limits[layer])

    def _embed(self, step: Pass) -> Tensor:
        return spread(super()._embed(step), self._connections.n)

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i = self._layers[layer], layer
        assert w.attn_norm is not None and w.ffn_norm is not None
        h, held = self._around_attention[i].read(step, x, f"hc_attn-{i}")
        attended = w.attention(step, i, w.attn_norm(step, h, f"attn_norm-{i}"))
        if attended is None:
            return None
        (h,) = step.keep_outputs(i, attended)
        x = add_output(h, held.keep_output_rows(step, i), f"hc_attn_post-{i}")
        h, held = self._around_network[i].read(step, x, f"hc_ffn-{i}")
        return add_output(w.feed_forward(step, i, w.ffn_norm(step, h, f"ffn_norm-{i}")), held, f"l_out-{i}")

    def _hidden(self, step: Pass, x: Tensor) -> Tensor:
        return super()._hidden(step, scale(add_up(step, x, "hc_head"), 1.0 / x.ne[1]))

    def layer_memory(self, layer: int) -> LayerMemory:
        """A latent row and the indexer's, or the state of the delta rule."""
        mixer = self._layers[layer].attention
        assert isinstance(mixer, (KimiDelta, SparseAttention))
        return mixer.layer_memory()
