"""Sparse attention over runs of tokens: consecutive tokens share one indexer key (GLM-5.3, Qwen4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import (
    add,
    argsort_top_k,
    cast,
    concat,
    cont,
    fill,
    get_rows,
    mul,
    norm,
    permute,
    repeat,
    reshape,
    scale,
    set_rows,
    soft_max_ext,
    sum_rows,
    view_2d,
)
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.batch import Batch
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import Rope
from llamado.models.inputs import Bytes, Input
from llamado.models.parts.indexer import IndexerSizes, scores
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights

Numbers = NDArray[np.int64]
_HIDDEN = -1e30
"""Score of unseen rows; minus infinity as f16."""


class RunMask(Input):
    """F32 [n_rows / size, n_tokens]: 1 for each run of `size` rows that a token sees completely, else 0.

    With `own`, 1 only for the incomplete run of the token's own row.
    """

    def __init__(self, n_rows: int, n_tokens: int, size: int, part: int, *, own: bool = False) -> None:
        super().__init__(f"pools{part}" + "_own" * own, TensorType.F32, n_rows // size, n_tokens)
        self._size, self._part, self._own = size, part, own

    def fill(self, batch: Batch) -> Bytes:
        rows, size = batch.memory[self._part], self._size
        found = np.zeros((self.ne[1], self.ne[0]), np.float32)
        for row, first, last in zip(found, rows.first.tolist(), rows.written.tolist(), strict=False):
            if not self._own:
                row[first // size : (last + 1) // size] = 1
            elif (last + 1) % size:
                row[last // size] = 1
        for start, stop, row_ranges in rows.prefixes if not self._own else ():
            for first, n in row_ranges:
                found[start:stop, first // size : (first + n) // size] = 1
        return found.reshape(-1).view(np.uint8)


def select_runs(step: Pass, layer: int, found: Tensor, n_chosen: int, mask: Tensor, *, tail: bool) -> Tensor:
    """Return `mask` with minus infinity for rows outside the `n_chosen` best runs: F16 [rows, n_tokens].

    `found` [runs, n_tokens] are the scores. With `tail`, the incomplete last run is seen too.
    """
    n_rows, (n_runs, n_tokens) = mask.ne[0], found.ne[:2]
    size, part = n_rows // n_runs, step.layer_cache(layer).number
    whole = step.input(RunMask(n_rows, n_tokens, size, part))
    found = add(found, scale(whole, -_HIDDEN, _HIDDEN), f"pool_score-{layer}")
    chosen = argsort_top_k(found, min(n_chosen, n_runs), f"pool_top_k-{layer}")
    each = reshape(whole, 1, n_runs, n_tokens)
    open_ = reshape(set_rows(fill(each, 0.0), get_rows(each, chosen), chosen), n_runs, n_tokens)
    if tail:
        open_ = add(open_, step.input(RunMask(n_rows, n_tokens, size, part, own=True)))
    shown = reshape(scale(open_, -_HIDDEN, _HIDDEN), 1, n_runs, n_tokens)
    shown = reshape(repeat(shown, size, n_runs, n_tokens, 1), n_rows, n_tokens)
    return cast(add(shown, cast(mask, TensorType.F32)), TensorType.F16, f"pool_mask-{layer}")


def _batch_runs(batch: Batch, part: int, size: int, n: int, n_seqs: int) -> tuple[Numbers, Numbers]:
    """Return the runs of each sequence that contain tokens of the batch, `n` numbers each, and its origin row.

    If a sequence has fewer runs, its last one is repeated; if the graph has more sequences, the first one's are.
    """
    rows = batch.memory[part]
    each = batch.n_tokens // (batch.n_seqs or 1)
    first, last = rows.written[::each] // size, rows.written[each - 1 :: each] // size
    runs = np.minimum(first[:, None] + np.arange(n), last[:, None])
    places = np.arange(n_seqs) % len(runs) * (np.arange(n_seqs) < len(runs))
    return runs[places], rows.origins[::each][places]


class RunNumbers(Input):
    """I64 [n × n_seqs]: numbers of the runs of `size` rows that contain the batch's tokens."""

    def __init__(self, n: int, n_seqs: int, size: int, part: int) -> None:
        super().__init__(f"runs{part}", TensorType.I64, n * n_seqs)
        self._given = part, size, n, n_seqs

    def fill(self, batch: Batch) -> Bytes:
        return _batch_runs(batch, *self._given)[0].astype(np.int64).reshape(-1).view(np.uint8)


class RunRows(Input):
    """I32 [size × n × n_seqs]: the rows of those runs."""

    def __init__(self, n: int, n_seqs: int, size: int, part: int) -> None:
        super().__init__(f"runs{part}_rows", TensorType.I32, size * n * n_seqs)
        self._given = part, size, n, n_seqs

    def fill(self, batch: Batch) -> Bytes:
        size = self._given[1]
        runs = _batch_runs(batch, *self._given)[0]
        return (runs[..., None] * size + np.arange(size)).astype(np.int32).reshape(-1).view(np.uint8)


class RunPositions(Input):
    """I32 [n × n_seqs]: the position of the first token of each of those runs in its sequence."""

    def __init__(self, n: int, n_seqs: int, size: int, part: int) -> None:
        super().__init__(f"runs{part}_positions", TensorType.I32, n * n_seqs)
        self._given = part, size, n, n_seqs

    def fill(self, batch: Batch) -> Bytes:
        runs, first = _batch_runs(batch, *self._given)
        return (runs * self._given[1] - first[:, None]).astype(np.int32).reshape(-1).view(np.uint8)


def _sizes(step: Pass, layer: int, size: int) -> tuple[int, int, int, int]:
    """Return the arguments of the inputs above: runs per sequence, sequences, run size, memory part."""
    each = step.shape.n_tokens // step.n_seqs
    return (each + size - 2) // size + 1, step.n_seqs, size, step.layer_cache(layer).number


def store_runs(step: Pass, layer: int, rows: Tensor, size: int, make: Callable[[Tensor], Tensor]) -> None:
    """Compute and store the keys of all runs that contain tokens of the batch, from `rows` [n, all].

    `make` computes keys [dim, n_runs] from rows [n, size · n_runs]. Incomplete runs are recomputed when they are
    complete. All sequences of the batch must have equally many tokens, as they have in models with recurrent state.
    """
    sizes = _sizes(step, layer, size)
    made = make(get_rows(rows, step.input(RunRows(*sizes))))
    all_ = _runs(step, layer, size, step.layer_cache(layer).part.n_rows)
    step.graph.expand(set_rows(all_, made, step.input(RunNumbers(*sizes)), f"pool_k-{layer}"))


def _runs(step: Pass, layer: int, size: int, n_rows: int) -> Tensor:
    """Return the keys of the runs of the first `n_rows` rows, [dim, n_rows / size]."""
    cache = step.layer_cache(layer).tensors[-1]
    row = cache.nb[1] * size
    return view_2d(cache, cache.ne[0] * size, n_rows // size, row)


class RunSelector(NamedTuple):
    """Selects runs by the mean of their tokens' keys, normed and rotated to the position of the first token.

    The `n_chosen` tokens in the best runs are seen, and those of the incomplete last run.
    """

    sizes: IndexerSizes
    size: int
    q: Linear
    k: Linear
    q_norm: RmsNorm
    k_norm: RmsNorm
    rope: Rope

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, sizes: IndexerSizes, size: int, rope: Rope) -> RunSelector:
        """Take `indexer.q_proj`, `indexer.k_proj`, `indexer.q_norm` and `indexer.k_norm`. Raises InvalidModel."""
        return cls(
            sizes=sizes,
            size=size,
            q=w.linear("indexer.q_proj", n_embd, sizes.n_head * sizes.dim),
            k=w.linear("indexer.k_proj", n_embd, sizes.dim),
            q_norm=RmsNorm.take(w, "indexer.q_norm", sizes.dim),
            k_norm=RmsNorm.take(w, "indexer.k_norm", sizes.dim),
            rope=rope,
        )

    def key(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        """Return the indexer keys of tokens, [dim, n_tokens]."""
        return self.k(step, x, f"indexer_k_raw-{layer}")

    @property
    def pooled(self) -> int:
        """Return a token's share of a run key, in elements."""
        return self.sizes.dim // self.size

    def pool(self, step: Pass, layer: int) -> None:
        """Store the keys of the runs that contain the batch's tokens."""

        def make(rows: Tensor) -> Tensor:
            means = self.k_norm(step, self._mean(rows), f"indexer_k_norm-{layer}")
            heads = reshape(means, self.sizes.dim, 1, means.ne[1])
            places = step.input(RunPositions(*_sizes(step, layer, self.size)))
            rotated = step.rotate(heads, self.rope, None, f"indexer_k_pe-{layer}", positions=places)
            return reshape(rotated, self.sizes.dim, means.ne[1])

        store_runs(step, layer, step.layer_cache(layer).tensors[2], self.size, make)

    def mask(self, step: Pass, layer: int, x: Tensor, mask: Tensor) -> Tensor:
        """Return `mask` with minus infinity for rows that are not selected: F16 [rows, n_tokens]."""
        (n_head, dim, n_chosen), n_rows, n_tokens = self.sizes, mask.ne[0], x.ne[1]
        if n_rows <= n_chosen:  # all tokens are selected
            return mask
        q = reshape(self.q(step, x, f"indexer_q-{layer}"), dim, n_head, n_tokens)
        q = step.rotate(self.q_norm(step, q, f"indexer_q_norm-{layer}"), self.rope, None, f"indexer_q_pe-{layer}")
        found = scale(scores(q, _runs(step, layer, self.size, n_rows), None), 1.0 / math.sqrt(dim))
        return select_runs(step, layer, found, n_chosen // self.size, mask, tail=True)

    def _mean(self, keys: Tensor) -> Tensor:
        """Return the mean key of each run, [dim, rows / size], from token keys [dim, rows]."""
        dim, size, row = keys.ne[0], self.size, keys.nb[1]
        parts = [cont(view_2d(keys, dim, keys.ne[1] // size, size * row, i * row)) for i in range(size)]
        total = parts[0]
        for part in parts[1:]:
            total = add(total, part)
        return scale(total, 1.0 / size)


class PooledIndexer(NamedTuple):
    """Selects runs by a mean of their tokens' keys, weighted per element by the softmax of the tokens' gates.

    `tail`: see `select_runs`.
    """

    sizes: IndexerSizes
    size: int
    q: Linear
    k: Linear
    k_scale: Tensor
    k_shift: Tensor
    weigh: Linear
    gate: Linear
    place: Tensor
    eps: float
    tail: bool

    @classmethod
    def take(
        cls, w: RoleWeights, n_embd: int, q_rank: int, sizes: IndexerSizes, size: int, eps: float, *, tail: bool
    ) -> PooledIndexer:
        """Take the indexer's projections and norm, and the compressor. Raises InvalidModel.

        Tensors: `indexer.attn_q_b`, `indexer.attn_k`, `indexer.k_norm`, `indexer.proj`, `indexer_compressor_gate` and
        `indexer_compressor_ape`.
        """
        return cls(
            sizes=sizes,
            size=size,
            q=w.linear("indexer.attn_q_b", q_rank, sizes.n_head * sizes.dim),
            k=w.linear("indexer.attn_k", n_embd, sizes.dim),
            k_scale=w.require("indexer.k_norm.weight", sizes.dim),
            k_shift=w.require("indexer.k_norm.bias", sizes.dim),
            weigh=w.linear("indexer.proj", n_embd, sizes.n_head),
            gate=w.linear("indexer_compressor_gate", n_embd, sizes.dim),
            place=w.require("indexer_compressor_ape.weight", sizes.dim, size),
            eps=eps,
            tail=tail,
        )

    @property
    def width(self) -> int:
        return 2 * self.sizes.dim

    def key(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        """Return the keys and gates of tokens, [2 · dim, n_tokens]."""
        k = mul(norm(self.k(step, x, f"indexer_k-{layer}"), self.eps), self.k_scale)
        return concat(add(k, self.k_shift, f"indexer_k_norm-{layer}"), self.gate(step, x, f"indexer_gate-{layer}"), 0)

    def mask(self, step: Pass, layer: int, x: Tensor, low: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Return `mask` with minus infinity for rows that are not selected: F16 [rows, n_tokens].

        `low` [q_rank, n_tokens] is the low-rank query input.
        """
        (n_head, dim, n_chosen), n_tokens = self.sizes, x.ne[1]
        q = reshape(self.q(step, low, f"indexer_q-{layer}"), dim, n_head, n_tokens)
        weights = scale(self.weigh(step, x, f"indexer_weights-{layer}"), 1.0 / math.sqrt(dim * n_head))
        found = scores(q, _runs(step, layer, self.size, mask.ne[0]), weights)
        return select_runs(step, layer, found, n_chosen // self.size, mask, tail=self.tail)

    @property
    def pooled(self) -> int:
        """Return a token's share of a run key, in elements."""
        return self.sizes.dim // self.size

    def pool(self, step: Pass, layer: int, first: int) -> None:
        """Store the keys of the runs that contain the batch's tokens.

        Token keys and gates start at element `first` of a cache row.
        """
        cache = step.layer_cache(layer).tensors[0]
        rows = view_2d(cache, self.width, cache.ne[1], cache.nb[1], cache.nb[1] * first // cache.ne[0])
        store_runs(step, layer, rows, self.size, self._means)

    def _means(self, both: Tensor) -> Tensor:
        """Return the run keys [dim, rows / size] from token keys and gates [2 · dim, rows]."""
        dim, size, n_runs = self.sizes.dim, self.size, both.ne[1] // self.size
        keys, gates = (
            reshape(cont(view_2d(both, dim, both.ne[1], both.nb[1], at * dim * both.nb[0])), dim, size, n_runs)
            for at in (0, 1)
        )
        gates, keys = (cont(permute(t, 1, 0, 2, 3)) for t in (add(gates, self.place), keys))
        return reshape(sum_rows(mul(soft_max_ext(gates, None, 1.0), keys)), dim, n_runs)
