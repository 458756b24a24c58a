"""The qwen4exp architecture: Qwen3.8 Flash Next."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import reshape
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.architectures.qwen.qwen35moe import Qwen35MoeModel
from llamado.models.decoder import NormNames
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters, interleaved_mrope
from llamado.models.keys import Keys
from llamado.models.memory import KeysValues, LayerMemory, RecurrentState
from llamado.models.memory.pool import ALIGN
from llamado.models.parts.attention import Mixer
from llamado.models.parts.gated_attention import GatedAttention
from llamado.models.parts.indexer import IndexerSizes
from llamado.models.parts.ngrams import Hashes, NgramLayer
from llamado.models.parts.pooled_indexer import RunSelector
from llamado.models.parts.recurrent.delta_net import DeltaNet
from llamado.models.parts.streams.spread import inject_output, spread
from llamado.models.parts.streams.stream_gates import StreamGates
from llamado.models.weights import RoleWeights, Weights

_STATES = 2
"""Number of the delta rule's states, which precede that of n-grams."""


class Qwen4ExpModel(Qwen35MoeModel):
    """Qwen3.5 MoE with low-rank hyper-connections, attention to selected runs of tokens, and n-gram embeddings.

    The streams' gates replace the norms. One layer has the n-gram embeddings.
    """

    norms = NormNames(None, None)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._n, self._rank = keys.int_("hyper_connection.count"), keys.int_("hyper_connection.low_rank")
        self._indexer = IndexerSizes.read(keys)
        self._pools = self._read_pools(keys, hp)
        name = keys.name("ple.layers")
        layers = keys.metadata.ints(name) if name in keys.metadata else ()
        self._ngram_layer, self._hashes = -1, None
        if layers:
            self._ngram_layer, self._hashes = layers[0], Hashes.read(keys)
            self._ngram_kernel = keys.int_("ple.conv_kernel")
            self._ngram_width = keys.int_("embedding_length_per_layer_input")
            if len(layers) > 1 or not 0 <= layers[0] < hp.n_layer or not self._recurrent[layers[0]]:
                raise InvalidModel(f"metadata key '{name}' is {list(layers)}; one recurrent layer is expected")
        return replace(hp, rope=interleaved_mrope(keys, hp.rope))

    def _read_pools(self, keys: Keys, hp: HyperParameters) -> tuple[int, ...]:
        """Return the number of tokens per indexer key in each layer; 0: full attention."""
        name = keys.name("attention.compress_ratios")
        n_blocks = hp.n_layer + hp.n_nextn
        found = keys.metadata.ints(name, n=n_blocks)[: hp.n_layer] if name in keys.metadata else (0,) * hp.n_layer
        sizes = {size for size in found if size}
        given = self._indexer.n_chosen, self._indexer.dim
        if len(sizes) > 1 or any(size < 2 or ALIGN % size or any(n % size for n in given) for size in sizes):
            raise UnsupportedModel(
                f"metadata key '{name}' is {list(found)}; one number for all layers that have any is expected, a "
                f"divisor of {ALIGN}, of '{keys.name('attention.indexer.top_k')}' and of the indexer's key_length"
            )
        if sizes and not any(self._recurrent):
            raise UnsupportedModel(f"metadata key '{name}' of a model without recurrent layers")
        return found

    @property
    def n_before(self) -> int:
        return 0 if self._hashes is None else self._hashes.n - 1

    def _take_head(self, weights: Weights) -> None:
        hp, w = self.hparams, weights.output
        self._gates_out = StreamGates.take(w, "output_hc", hp.n_embd, self._n, self._rank, injects=False)
        if w.has("output.weight"):
            self._output = w.linear("output", hp.n_embd, hp.n_vocab)
        else:
            self._output = Linear(w.share("output.weight", self._token_embd))

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        n_embd, layers = self.hparams.n_embd, range(self.hparams.n_layer)
        self._gates_attn, self._gates_ffn = (
            [StreamGates.take(weights.layer(i), name, n_embd, self._n, self._rank) for i in layers]
            for name in ("hc_attn", "hc_ffn")
        )
        self._ngrams = None
        if self._hashes is not None:
            name = "per_layer_token_embd.weight"
            n_rows = weights.ne(name)[1]
            if n_rows < self._hashes.n_rows:
                raise InvalidModel(f"tensor '{name}' has {n_rows} rows; {self._hashes.n_rows} are expected")
            table, w = weights.input.require(name, self._ngram_width, n_rows), weights.layer(self._ngram_layer)
            self._ngrams = NgramLayer.take(w, table, self._hashes, n_embd, self._n, self._ngram_kernel, _STATES)

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp, size, found = self.hparams, self._pools[layer], super()._take_mixer(w, layer)
        if not isinstance(found, GatedAttention):
            return found
        if size:
            return found._replace(selector=RunSelector.take(w, hp.n_embd, self._indexer, size, hp.rope))
        w.ignore(*(f"indexer.{part}.weight" for part in ("q_proj", "k_proj", "q_norm", "k_norm")))
        return found

    def _take_delta_net(self, w: RoleWeights) -> DeltaNet:
        return super()._take_delta_net(w)._replace(gate=UnaryOp.SIGMOID)

    def _embed(self, step: Pass) -> Tensor:
        return spread(super()._embed(step), self._n)

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i = self._layers[layer], layer
        if self._ngrams is not None and i == self._ngram_layer:
            x = self._ngrams(step, i, x)
        seen, added = self._gates_attn[i](step, x, f"hc_attn-{i}")
        attended = w.attention(step, i, step.graph.expand(seen))
        if attended is None:
            return None
        assert added is not None
        n_embd, n, n_tokens, _ = x.ne
        attended, added, rows = step.keep_outputs(i, attended, added, reshape(x, n * n_embd, n_tokens))
        x = inject_output(reshape(rows, n_embd, n, rows.ne[1]), attended, added, f"hc_attn_combine-{i}")
        seen, added = self._gates_ffn[i](step, x, f"hc_ffn-{i}")
        assert added is not None
        return inject_output(x, w.feed_forward(step, i, seen), added, f"l_out-{i}")

    def _hidden(self, step: Pass, x: Tensor) -> Tensor:
        return self._gates_out(step, x, "result_norm")[0]

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys, values and indexer keys, or the states of the delta rule and of n-grams."""
        found = super().layer_memory(layer)
        if isinstance(found, RecurrentState) and self._ngrams is not None and layer == self._ngram_layer:
            return RecurrentState((*found.widths, self._ngrams.width()))
        if isinstance(found, KeysValues) and self._pools[layer]:
            return replace(found, index=self._indexer.dim, pooled=self._indexer.dim // self._pools[layer])
        return found
