"""What all architectures share: the batch, the key-value cache, and the frame of a forward pass around their layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from llamado.ggml.graph import (
    Graph,
    add,
    flash_attn_ext,
    get_rows,
    mul,
    mul_mat,
    new_tensor,
    permute,
    reshape,
    rms_norm,
    rope_ext,
    scale,
    set_rows,
    view_2d,
    view_4d,
)
from llamado.ggml.ops import PrecType
from llamado.ggml.tensor import Tensor
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models.adapter import Adapter
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.hparams import HyperParameters, Rope
from llamado.models.keys import Keys
from llamado.models.weights import Weights

_F32_PRECISION = PrecType.F32

KV_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0)
"""Types a cache can have. ggml's GPU back ends want F16 or Q8_0."""


class Output(Enum):
    """What a forward pass gives for a row: LOGITS, the hidden state after the last norm, or a classifier's SCORES."""

    LOGITS = "logits"
    HIDDEN = "hidden"
    SCORES = "scores"


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The sizes a graph is built for: tokens computed, rows that are given out, cells of the cache that attention
    reads; what is given out; and how strong each of the model's adapters is (none given: all 0).

    `n_outputs` may be 0: a chunk of a prompt that only fills the cache.
    """

    n_tokens: int
    n_outputs: int
    n_kv: int
    output: Output = Output.LOGITS
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.n_tokens < 1 or not 0 <= self.n_outputs <= self.n_tokens or self.n_kv < 1:
            raise ValueError(f"not a batch: {self}")


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of all layers: `k[layer]` and `v[layer]` are [elements of a token, n_cells]; a cell is a row."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    n_cells: int


class Pass:
    """A forward pass being built: its graph, and the inputs, each made when a layer first asks for it."""

    __slots__ = ("_adapters", "_hparams", "_kv", "_last", "graph", "shape")

    def __init__(
        self, hparams: HyperParameters, shape: BatchShape, kv: KVCache, adapters: Sequence[Adapter] = ()
    ) -> None:
        self.graph = Graph()
        self.shape = shape
        self._hparams = hparams
        self._kv = kv
        self._adapters = [pair for pair in zip(adapters, shape.scales, strict=False) if pair[1]]
        # The layer after which only the rows with logits go on.
        self._last = hparams.n_layer - 1

    def _input(self, name: str, type: TensorType, *ne: int) -> Tensor:
        return self.graph.inputs.get(name) or self.graph.input(name, type, *ne)

    def tokens(self) -> Tensor:
        """I32 [n_tokens]: the tokens."""
        return self._input("tokens", TensorType.I32, self.shape.n_tokens)

    def positions(self) -> Tensor:
        """I32 [n_tokens]: the place of each token in its sequence."""
        return self._input("positions", TensorType.I32, self.shape.n_tokens)

    def cells(self) -> Tensor:
        """I64 [n_tokens]: the cell of the cache each token's keys and values go to."""
        return self._input("cells", TensorType.I64, self.shape.n_tokens)

    def mask(self, layer: int) -> Tensor:
        """F16 [n_kv, n_tokens]: 0 where a token (row) sees a cell, minus infinity elsewhere."""
        name = "mask_swa" if self._hparams.is_swa(layer) else "mask"
        return self._input(name, TensorType.F16, self.shape.n_kv, self.shape.n_tokens)

    def out_rows(self) -> Tensor:
        """I32 [n_outputs]: the rows of the batch that get logits."""
        return self._input("out_rows", TensorType.I32, self.shape.n_outputs)

    def mul_mat(self, weight: Tensor, x: Tensor, name: str) -> Tensor:
        """Products of a matrix, with what adapters add to them."""
        y = mul_mat(weight, x, name=name)
        for adapter, strength in self._adapters:
            pair = adapter.pairs.get(weight.name)
            if pair is not None:
                more = mul_mat(pair.b, mul_mat(pair.a, x))
                y = add(y, scale(more, adapter.strength(weight.name, strength)), name)
        return y

    def get_rows(self, weight: Tensor, rows: Tensor, name: str) -> Tensor:
        """Rows of an embedding, with what adapters add to them."""
        y = get_rows(weight, rows, name)
        for adapter, strength in self._adapters:
            pair = adapter.pairs.get(weight.name)
            if pair is not None:
                more = mul_mat(pair.b, get_rows(pair.a, rows))
                y = add(y, scale(more, adapter.strength(weight.name, strength)), name)
        return y

    def norm(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        """RMS norm, scaled by a weight."""
        return mul(rms_norm(x, self._hparams.norm_eps), weight, name)

    def rotate(self, x: Tensor, rope: Rope, freq_factors: Tensor | None, name: str) -> Tensor:
        """Rotary position embedding of heads [head_dim, n_head, n_tokens]."""
        return rope_ext(
            x,
            self.positions(),
            freq_factors,
            rope.n_dims,
            rope.mode,
            rope.n_ctx_orig,
            rope.freq_base,
            rope.freq_scale,
            rope.ext_factor,
            rope.attn_factor,
            rope.beta_fast,
            rope.beta_slow,
            name,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
        """Writes keys and values to the cache and attends: F32 [head_dim × n_head, n_tokens].

        q, k, v are [head_dim, heads, n_tokens]. None when nothing behind the cache is wanted: the last layer of a batch
        without logits.
        """
        graph, kv, n_kv = self.graph, self._kv, self.shape.n_kv
        only_cache = layer == self._last and not self.shape.n_outputs
        # The order in which llama.cpp expands them; models with sliding windows have their own.
        wanted = (q, k, v) if self._hparams.n_swa else (q, v, k)
        for tensor in wanted[1:] if only_cache else wanted:
            graph.expand(tensor)
        cells = self.cells()
        k_cache, v_cache = kv.k[layer], kv.v[layer]
        graph.expand(set_rows(k_cache, view_2d(k, k.ne[0] * k.ne[1], k.ne[2], k.nb[2]), cells))
        graph.expand(set_rows(v_cache, view_2d(v, v.ne[0] * v.ne[1], v.ne[2], v.nb[2]), cells))
        if only_cache:
            return None
        q = view_4d(q, *q.ne, q.nb[1], q.nb[2], q.nb[3])
        out = flash_attn_ext(
            permute(q, 0, 2, 1, 3),
            permute(_heads(k_cache, k, n_kv), 0, 2, 1, 3),
            permute(_heads(v_cache, v, n_kv), 0, 2, 1, 3),
            self.mask(layer),
            scale,
            precision=_F32_PRECISION,
        )
        return graph.expand(reshape(out, out.ne[0] * out.ne[1], out.ne[2], name=f"kqv_out-{layer}"))

    def keep_outputs(self, layer: int, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """In the last layer, only the rows that get logits: nothing after attention mixes rows."""
        if layer != self._last:
            return attended, residual
        rows = self.out_rows()
        return get_rows(attended, rows), get_rows(residual, rows)


def _heads(cache: Tensor, now: Tensor, n_kv: int) -> Tensor:
    """The first `n_kv` cells of a cache as [head_dim, n_head_kv, n_kv]."""
    head_dim, n_head, row = now.ne[0], now.ne[1], cache.nb[1]
    return view_4d(cache, head_dim, n_head, n_kv, 1, row // n_head, row, cache.nb[2])


class Model(ABC):
    """An architecture bound to one file: its sizes, its weights, and how they make a forward pass.

    `hparams` are the sizes; `weights` the file's tensors by their GGUF names; `adapters` what may be added to them.
    """

    architecture: ClassVar[str]
    hparams: HyperParameters
    weights: dict[str, Tensor]
    adapters: tuple[Adapter, ...]

    def __init__(self, file: GGUFFile) -> None:
        """Raises GgufError, InvalidModel or UnsupportedModel, naming the key or tensor that is wrong."""
        weights = Weights(file)
        n_vocab = weights.ne("token_embd.weight")[1]
        tokens = file.metadata.strings("tokenizer.ggml.tokens", None)
        if tokens is not None and len(tokens) != n_vocab:
            raise InvalidModel(
                f"{file.path}: tensor 'token_embd.weight' has {n_vocab} rows, but 'tokenizer.ggml.tokens' names "
                f"{len(tokens)} tokens"
            )
        self.hparams = self._read_hparams(Keys(file.metadata), n_vocab)
        self._token_embd = weights.need("token_embd.weight", self.hparams.n_embd, n_vocab)
        self._take_head(weights)
        self._take_weights(weights)
        weights.check_all_taken()
        self.weights = weights.taken
        self.adapters = ()

    @abstractmethod
    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters: ...

    def _take_head(self, weights: Weights) -> None:
        """What comes after the layers."""
        self._output_norm = weights.need("output_norm.weight", self.hparams.n_embd)
        # Without a matrix of its own the head shares the embedding's.
        self._output = weights.maybe("output.weight", self.hparams.n_embd, self.hparams.n_vocab) or self._token_embd

    @abstractmethod
    def _take_weights(self, weights: Weights) -> None: ...

    @abstractmethod
    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        """The hidden state after a layer; None when `step.attend` gave none."""

    def _embed(self, step: Pass) -> Tensor:
        return step.get_rows(self._token_embd, step.tokens(), "embd")

    def _hidden(self, step: Pass, x: Tensor) -> Tensor:
        return step.norm(x, self._output_norm, "result_norm")

    def _head(self, step: Pass, x: Tensor) -> Tensor:
        return step.mul_mat(self._output, self._hidden(step, x), "result_output")

    def _scores(self, step: Pass, x: Tensor) -> Tensor:
        """What the classifier makes of hidden states; where a model has none, as llama.cpp, those themselves."""
        return self._hidden(step, x)

    def width(self, output: Output) -> int:
        """Numbers that a row of an output has."""
        return self.hparams.n_vocab if output is Output.LOGITS else self.hparams.n_embd

    @property
    def generates(self) -> bool:
        """Whether it has logits: whether text can be made with it."""
        return True

    def kv_tensors(
        self, n_cells: int, type_k: TensorType = TensorType.F16, type_v: TensorType = TensorType.F16
    ) -> KVCache:
        """A cache of `n_cells` cells, not yet placed in memory; raises UnsupportedModel for types that do not fit."""
        hp = self.hparams
        for type in (type_k, type_v):
            if type not in KV_TYPES:
                raise UnsupportedModel(f"a cache of type {type.name}; known are {', '.join(t.name for t in KV_TYPES)}")
            if hp.head_dim_k % type.block_size:
                raise UnsupportedModel(
                    f"a {type.name} cache needs heads of whole blocks, not of {hp.head_dim_k} elements"
                )
        return KVCache(
            k=tuple(new_tensor(type_k, hp.n_embd_k(i), n_cells, name=f"cache_k_l{i}") for i in range(hp.n_layer)),
            v=tuple(new_tensor(type_v, hp.n_embd_v(i), n_cells, name=f"cache_v_l{i}") for i in range(hp.n_layer)),
            n_cells=n_cells,
        )

    def build(self, shape: BatchShape, kv: KVCache) -> Graph:
        """The forward pass of a batch.

        Inputs (those that are used): "tokens" and "positions" I32 [n_tokens]; "cells" I64 [n_tokens]; "mask",
        "mask_swa" F16 [n_kv, n_tokens]; "out_rows" I32 [n_outputs]. Output: "logits" F32 [n_vocab, n_outputs],
        "hidden" [n_embd, n_outputs] or "scores", as the shape says; none when n_outputs is 0. Raises ValueError for
        more cells than the cache has, UnsupportedModel for an output that the model does not have.
        """
        if shape.n_kv > kv.n_cells:
            raise ValueError(f"attention over {shape.n_kv} cells of a cache of {kv.n_cells}")
        step = Pass(self.hparams, shape, kv, self.adapters)
        graph = step.graph
        x: Tensor | None = graph.expand(self._embed(step))
        for layer in range(self.hparams.n_layer):
            assert x is not None  # only the last layer may give none
            x = self._layer(step, layer, x)
        if x is not None and shape.n_outputs:
            outputs = {Output.LOGITS: self._head, Output.HIDDEN: self._hidden, Output.SCORES: self._scores}
            graph.output(shape.output.value, outputs[shape.output](step, x))
        return graph
