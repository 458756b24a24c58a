"""The hy_v4 architecture: HY 4."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import add, mul, reshape, rms_norm, scale, sigmoid, view_1d, view_2d
from llamado.ggml.ops import GluOp
from llamado.ggml.tensor import Tensor
from llamado.models.architectures.deepseek.deepseek2 import Deepseek2Model
from llamado.models.architectures.deepseek.deepseek32 import read_indexed
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters, Rope
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer, OutputGate
from llamado.models.parts.experts import Mixture, add_up
from llamado.models.parts.feedforward import FeedForward
from llamado.models.parts.indexer import ALL, Indexer, IndexerSizes, SparseAttention
from llamado.models.parts.latent import LatentAttention
from llamado.models.parts.streams.spread import inject_output, spread
from llamado.models.weights import RoleWeights, Weights


class StreamParts(NamedTuple):
    """Number of streams, and the range of their weights.

    `least` is added to every weight; `most` is the factor of the output weights.
    """

    n: int
    least: float
    most: float


class HyperConnection(NamedTuple):
    """Hyper-connections (arXiv 2409.19606): weights of several residual streams, computed from all of them."""

    mix: Linear
    factors: Tensor
    shifts: Tensor
    streams: StreamParts

    @classmethod
    def take(
        cls, w: RoleWeights, name: str, n_embd: int, n_out: int, n_factors: int, streams: StreamParts
    ) -> HyperConnection:
        """Take `name_fn`, `name_scale` and `name_base`. Raises InvalidModel."""
        mix = w.linear(f"{name}_fn", streams.n * n_embd, n_out)
        return cls(mix, w.require(f"{name}_scale.weight", n_factors), w.require(f"{name}_base.weight", n_out), streams)

    def read(self, step: Pass, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Return a block's input [n_embd, n_tokens] for streams x [n_embd, n, n_tokens], and the projected weights."""
        n_embd, n, n_tokens = x.ne[:3]
        mixes = self.mix(step, rms_norm(reshape(x, n * n_embd, n_tokens), step.norm_eps), f"{name}_mixes")
        parts = scale(self._parts(mixes, 0), 1.0, self.streams.least, f"{name}_pre")
        return add_up(step, mul(x, reshape(parts, 1, n, n_tokens)), f"{name}_in"), mixes

    def output_weights(self, mixes: Tensor, name: str) -> Tensor:
        """Return the weights [n, n_tokens] of the block's output for each stream."""
        return scale(self._parts(mixes, 1), self.streams.most, self.streams.least, f"{name}_post")

    def _parts(self, mixes: Tensor, number: int) -> Tensor:
        n, size = self.streams.n, mixes.nb[0]
        part = view_2d(mixes, n, mixes.ne[1], mixes.nb[1], number * n * size)
        part = mul(part, view_1d(self.factors, 1, number * size))
        return sigmoid(add(part, view_1d(self.shifts, n, number * n * size)))


class HyV4Model(Deepseek2Model):
    """DeepSeek V3.2 (V3 without an indexer) with gated heads, attention sinks and hyper-connections.

    Each block reads a weighted sum of the streams, and its output is added to each stream with a weight.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        if not self._absorbed or not self._q_rank:
            raise InvalidModel(
                f"metadata keys '{keys.name('attention.key_length_mla')}' and '{keys.name('attention.q_lora_rank')}' "
                "are expected"
            )
        self._streams = StreamParts(
            keys.int_("hyper_connection.count"),
            keys.float_("hyper_connection.epsilon"),
            keys.float_("hyper_connection.magnitude"),
        )
        self._limits = keys.floats_per_layer("swiglu_clamp_exp", hp.n_layer + hp.n_nextn, 0.0)
        self._indexer: IndexerSizes | None = None
        if keys.has("attention.indexer.top_k"):
            self._indexer = IndexerSizes.read(keys)
            if self._indexer.dim <= hp.rope.n_dims:
                raise InvalidModel(
                    f"metadata key '{keys.name('attention.indexer.key_length')}' is {self._indexer.dim}; more than "
                    f"the {hp.rope.n_dims} elements that are rotated are expected"
                )
            self._indexed = read_indexed(keys, hp.n_layer)
        return hp

    def _extended(self, rope: Rope, multiplier: float) -> tuple[Rope, float]:
        return rope, 1.0

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        n, n_embd = self._streams.n, self.hparams.n_embd
        self._connections = [
            tuple(
                HyperConnection.take(weights.layer(i), name, n_embd, 2 * n, 2, self._streams)
                for name in ("hc_attn", "hc_ffn")
            )
            for i in range(self.hparams.n_layer)
        ]
        self._output_connection = HyperConnection.take(weights.output, "output_hc", n_embd, n, 1, self._streams)

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp, s = self.hparams, self._sizes
        latent = super()._take_mixer(w, layer)
        assert isinstance(latent, LatentAttention)
        attention = SparseAttention(
            latent,
            indexer=None,
            owner=0,
            n_chosen=ALL,
            gate=OutputGate(w.linear("attn_gate", hp.n_embd, s.n_head * s.value), s.n_head),
            sinks=w.require("attn_sinks.weight", s.n_head),
        )
        if self._indexer is not None:
            owner = max(i for i in range(layer + 1) if self._indexed[i])
            attention = attention._replace(owner=owner, n_chosen=self._indexer.n_chosen)
            if owner == layer:
                taken = Indexer.take(w, hp.n_embd, self._q_rank, self._indexer, hp.rope, hp.norm_eps)
                own = taken._replace(rope_at=self._indexer.dim - hp.rope.n_dims, hadamard=False)
                attention = attention._replace(indexer=own)
        return attention

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        found = super()._take_feed_forward(w, layer)
        if isinstance(found, Mixture):
            return found._replace(activation=GluOp.SWIGLU_CLAMP, limit=self._limits[layer])
        return found

    def layer_memory(self, layer: int) -> LayerMemory:
        """One latent row, and the indexer's key if the layer has one."""
        attention = self._layers[layer].attention
        assert isinstance(attention, SparseAttention)
        return attention.layer_memory()

    def _embed(self, step: Pass) -> Tensor:
        return spread(super()._embed(step), self._streams.n, "hc_init")

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i, (n_embd, n, n_tokens) = self._layers[layer], layer, x.ne[:3]
        before, after = self._connections[layer]
        assert w.attn_norm is not None and w.ffn_norm is not None
        h, mixes = before.read(step, x, f"hc_attn-{i}")
        attended = w.attention(step, i, w.attn_norm(step, h, f"attn_norm-{i}"))
        if attended is None:
            return None
        attended, mixes, flat = step.keep_outputs(i, attended, mixes, reshape(x, n_embd * n, n_tokens))
        x = reshape(flat, n_embd, n, flat.ne[1])
        x = inject_output(x, attended, before.output_weights(mixes, f"hc_attn-{i}"), f"hc_attn_out-{i}")
        h, mixes = after.read(step, x, f"hc_ffn-{i}")
        y = w.feed_forward(step, i, w.ffn_norm(step, h, f"ffn_norm-{i}"))
        return inject_output(x, y, after.output_weights(mixes, f"hc_ffn-{i}"), f"l_out-{i}")

    def _hidden(self, step: Pass, x: Tensor) -> Tensor:
        return super()._hidden(step, self._output_connection.read(step, x, "hc_head")[0])
