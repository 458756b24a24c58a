"""Sparse attention that chooses among runs of tokens: as many together have one key (GLM-5.3, Qwen4)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

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

_HIDDEN = -1e30
"""The score of what is not seen; as f16 it is minus infinity."""


class Pools(Input):
    """F32 [n_rows / size, n_tokens]: 1 at the runs of `size` rows of a part of the memory that a token sees the whole
    of, 0 elsewhere; or with `own` at the one that the token's own row is in and not the last of.
    """

    def __init__(self, n_rows: int, n_tokens: int, size: int, part: int, *, own: bool = False) -> None:
        super().__init__(f"pools{part}" + "_own" * own, TensorType.F32, n_rows // size, n_tokens)
        self._size, self._part, self._own = size, part, own

    def fill(self, batch: Batch) -> Bytes:
        """See Input."""
        rows, size = batch.memory[self._part], self._size
        found = np.zeros((self.ne[1], self.ne[0]), np.float32)
        for row, first, last in zip(found, rows.first.tolist(), rows.written.tolist(), strict=False):
            if not self._own:
                row[first // size : (last + 1) // size] = 1
            elif (last + 1) % size:
                row[last // size] = 1
        return found.reshape(-1).view(np.uint8)


def choose_pools(step: Pass, layer: int, found: Tensor, n_chosen: int, mask: Tensor, *, tail: bool) -> Tensor:
    """F16 [rows, n_tokens]: `mask`, and minus infinity where a row is in none of the `n_chosen` runs that have the
    greatest of the scores `found` [runs, n_tokens].

    `tail`: the run that is not whole yet is seen, too.
    """
    n_rows, (n_runs, n_tokens) = mask.ne[0], found.ne[:2]
    size, part = n_rows // n_runs, step.kept(layer).number
    whole = step.input(Pools(n_rows, n_tokens, size, part))
    found = add(found, scale(whole, -_HIDDEN, _HIDDEN), f"pool_score-{layer}")
    chosen = argsort_top_k(found, min(n_chosen, n_runs), f"pool_top_k-{layer}")
    each = reshape(whole, 1, n_runs, n_tokens)
    open_ = reshape(set_rows(fill(each, 0.0), get_rows(each, chosen), chosen), n_runs, n_tokens)
    if tail:
        open_ = add(open_, step.input(Pools(n_rows, n_tokens, size, part, own=True)))
    shown = reshape(scale(open_, -_HIDDEN, _HIDDEN), 1, n_runs, n_tokens)
    shown = reshape(repeat(shown, size, n_runs, n_tokens, 1), n_rows, n_tokens)
    return cast(add(shown, cast(mask, TensorType.F32)), TensorType.F16, f"pool_mask-{layer}")


class RunPositions(Input):
    """I32 [n_rows / size]: the place of the first token of each run of `size` rows in its sequence."""

    def __init__(self, n_rows: int, size: int, part: int) -> None:
        super().__init__(f"pools{part}_positions", TensorType.I32, n_rows // size)
        self._size, self._part = size, part

    def fill(self, batch: Batch) -> Bytes:
        """See Input."""
        rows, size = batch.memory[self._part], self._size
        found = np.zeros(self.ne[0], np.int32)
        for first, last in dict(zip(rows.first.tolist(), rows.written.tolist(), strict=True)).items():
            places = np.arange(0, last + 1 - first, size, dtype=np.int32)
            found[first // size : first // size + places.size] = places
        return found.view(np.uint8)


class RunChooser(NamedTuple):
    """The key of a run of `size` tokens is the mean of theirs, normed, and turned to the place of its first token.

    The `n_chosen` tokens in runs of the greatest scores are seen, and those of the run that is not whole yet.
    """

    sizes: IndexerSizes
    size: int
    q: Linear
    k: Linear
    q_norm: RmsNorm
    k_norm: RmsNorm
    rope: Rope

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, sizes: IndexerSizes, size: int, rope: Rope) -> RunChooser:
        """`indexer.q_proj`, `indexer.k_proj`, `indexer.q_norm` and `indexer.k_norm`. Raises InvalidModel."""
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
        """The keys of tokens, [dim, n_tokens]."""
        return self.k(step, x, f"indexer_k_raw-{layer}")

    def mask(self, step: Pass, layer: int, x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """F16 [rows, n_tokens]: `mask`, and minus infinity where a row of `keys` [dim, rows] is not chosen."""
        (n_head, dim, n_chosen), n_rows, n_tokens = self.sizes, keys.ne[1], x.ne[1]
        if n_rows <= n_chosen:  # all are
            return mask
        q = reshape(self.q(step, x, f"indexer_q-{layer}"), dim, n_head, n_tokens)
        q = step.rotate(self.q_norm(step, q, f"indexer_q_norm-{layer}"), self.rope, None, f"indexer_q_pe-{layer}")
        places = step.input(RunPositions(n_rows, self.size, step.kept(layer).number))
        pooled = reshape(self.k_norm(step, self._mean(keys), f"indexer_k_norm-{layer}"), dim, 1, n_rows // self.size)
        pooled = step.rotate(pooled, self.rope, None, f"indexer_k_pe-{layer}", positions=places)
        pooled = reshape(pooled, dim, n_rows // self.size)
        found = scale(scores(q, cast(pooled, TensorType.F16, f"indexer_k-{layer}"), None), 1.0 / math.sqrt(dim))
        return choose_pools(step, layer, found, n_chosen // self.size, mask, tail=True)

    def _mean(self, keys: Tensor) -> Tensor:
        """Of keys of tokens [dim, rows] the means of runs [dim, rows / size]."""
        dim, size = keys.ne[0], self.size
        each = cast(keys, TensorType.F32)
        row = each.nb[1]
        parts = [cont(view_2d(each, dim, keys.ne[1] // size, size * row, i * row)) for i in range(size)]
        total = parts[0]
        for part in parts[1:]:
            total = add(total, part)
        return scale(total, 1.0 / size)


class PooledIndexer(NamedTuple):
    """The key of a run of `size` tokens is a mean of theirs, weighted in each element by the softmax of their gates.

    `tail`: see `choose_pools`.
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
        """`indexer.attn_q_b`, `indexer.attn_k`, `indexer.k_norm`, `indexer.proj`, `indexer_compressor_gate` and
        `indexer_compressor_ape`. Raises InvalidModel.
        """
        return cls(
            sizes=sizes,
            size=size,
            q=w.linear("indexer.attn_q_b", q_rank, sizes.n_head * sizes.dim),
            k=w.linear("indexer.attn_k", n_embd, sizes.dim),
            k_scale=w.need("indexer.k_norm.weight", sizes.dim),
            k_shift=w.need("indexer.k_norm.bias", sizes.dim),
            weigh=w.linear("indexer.proj", n_embd, sizes.n_head),
            gate=w.linear("indexer_compressor_gate", n_embd, sizes.dim),
            place=w.need("indexer_compressor_ape.weight", sizes.dim, size),
            eps=eps,
            tail=tail,
        )

    @property
    def width(self) -> int:
        return 2 * self.sizes.dim

    def key(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        """The keys and gates of tokens, [2 · dim, n_tokens]."""
        k = mul(norm(self.k(step, x, f"indexer_k-{layer}"), self.eps), self.k_scale)
        return concat(add(k, self.k_shift, f"indexer_k_norm-{layer}"), self.gate(step, x, f"indexer_gate-{layer}"), 0)

    def mask(self, step: Pass, layer: int, x: Tensor, low: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """F16 [rows, n_tokens]: `mask`, and minus infinity where a row of `keys` [2 · dim, rows] is not chosen.

        `low` [q_rank, n_tokens] is what queries are made of.
        """
        (n_head, dim, n_chosen), n_tokens = self.sizes, x.ne[1]
        q = reshape(self.q(step, low, f"indexer_q-{layer}"), dim, n_head, n_tokens)
        weights = scale(self.weigh(step, x, f"indexer_weights-{layer}"), 1.0 / math.sqrt(dim * n_head))
        found = scores(q, cast(self._pooled(keys), TensorType.F16, f"indexer_pool_k-{layer}"), weights)
        return choose_pools(step, layer, found, n_chosen // self.size, mask, tail=self.tail)

    def _pooled(self, kept: Tensor) -> Tensor:
        """The keys of runs, [dim, rows / size]."""
        dim, size, n_runs = self.sizes.dim, self.size, kept.ne[1] // self.size
        both = cast(kept, TensorType.F32)
        keys, gates = (
            reshape(cont(view_2d(both, dim, both.ne[1], both.nb[1], at * dim * both.nb[0])), dim, size, n_runs)
            for at in (0, 1)
        )
        gates, keys = (cont(permute(t, 1, 0, 2, 3)) for t in (add(gates, self.place), keys))
        return reshape(sum_rows(mul(soft_max_ext(gates, None, 1.0), keys)), dim, n_runs)
