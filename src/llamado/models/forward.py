"""A forward pass as it is built: the graph, its inputs, and what layers of all architectures are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llamado.ggml.graph import (
    Graph,
    add,
    flash_attn_ext,
    get_rows,
    mul,
    mul_mat,
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
from llamado.gguf.types import TensorType
from llamado.models.adapter import Adapter
from llamado.models.batch import BatchShape
from llamado.models.cache import KVCache
from llamado.models.hparams import HyperParameters, Rope

_F32_PRECISION = PrecType.F32


class Linear(NamedTuple):
    """A matrix, and where the file has one a bias."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        y = step.mul_mat(self.weight, x, name)
        return y if self.bias is None else add(y, self.bias, name)


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
