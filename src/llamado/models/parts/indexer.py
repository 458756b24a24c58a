"""Sparse attention over latent rows (DeepSeek Sparse Attention, arXiv 2512.02556): an indexer selects tokens."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple, Protocol

from llamado.ggml.graph import (
    add,
    argsort_top_k,
    cast,
    concat,
    cont,
    fill,
    get_rows,
    mul,
    mul_mat,
    norm,
    permute,
    relu,
    reshape,
    scale,
    set_rows,
    sum_rows,
    view_2d,
    view_3d,
)
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.forward import Linear, Pass
from llamado.models.hadamard import Hadamard, rotate_heads
from llamado.models.hparams import Rope
from llamado.models.keys import Keys
from llamado.models.memory import Latent, LayerMemory
from llamado.models.parts.attention import OutputGate
from llamado.models.parts.latent import LatentAttention, LowRank
from llamado.models.weights import RoleWeights

ALL = 2**31
"""More than any number of tokens: nothing is left out."""
_TOGETHER = 4
"""Heads whose products with all tokens are in memory at the same time."""


class IndexerSizes(NamedTuple):
    """Indexer heads, their size, and the number of tokens they select."""

    n_head: int
    dim: int
    n_chosen: int

    @classmethod
    def read(cls, keys: Keys) -> IndexerSizes:
        """Read the sizes of a file's indexers. Raises GgufError or InvalidModel."""
        return cls(*(keys.int_(f"attention.indexer.{name}") for name in ("head_count", "key_length", "top_k")))


class Indexer(NamedTuple):
    """Lightning indexer: selects the tokens with the greatest Σ over heads of weight · relu(query · key).

    `rope_at`: first rotated element of a head; `hadamard`: keys are Hadamard-rotated, as they are stored.
    """

    sizes: IndexerSizes
    q: Linear
    k: Linear
    k_scale: Tensor
    k_shift: Tensor
    weigh: Linear
    rope: Rope
    eps: float
    rope_at: int = 0
    hadamard: bool = True

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, q_rank: int, sizes: IndexerSizes, rope: Rope, eps: float) -> Indexer:
        """Take `indexer.attn_q_b`, `indexer.attn_k`, `indexer.k_norm` and `indexer.proj`. Raises InvalidModel."""
        return cls(
            sizes,
            w.linear("indexer.attn_q_b", q_rank, sizes.n_head * sizes.dim),
            w.linear("indexer.attn_k", n_embd, sizes.dim),
            w.require("indexer.k_norm.weight", sizes.dim),
            w.require("indexer.k_norm.bias", sizes.dim),
            w.linear("indexer.proj", n_embd, sizes.n_head),
            rope,
            eps,
        )

    @property
    def width(self) -> int:
        return self.sizes.dim

    @property
    def pooled(self) -> int:
        return 0

    def pool(self, step: Pass, layer: int, first: int) -> None:
        """Do nothing: each token has a key of its own."""

    def key(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        """Return the indexer keys of tokens, [dim, n_tokens]."""
        dim, n_tokens = self.sizes.dim, x.ne[1]
        k = mul(norm(self.k(step, x, f"indexer_k-{layer}"), self.eps), self.k_scale)
        k = reshape(add(k, self.k_shift, f"indexer_k_norm-{layer}"), dim, 1, n_tokens)
        return reshape(self._rotated(step, k, f"indexer_k_pe-{layer}"), dim, n_tokens)

    def mask(self, step: Pass, layer: int, x: Tensor, low: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Return `mask` with minus infinity for rows that are not selected: F16 [rows, n_tokens].

        `keys` are [dim, rows]; `low` [q_rank, n_tokens] is the low-rank query input.
        """
        sizes, n_rows, n_tokens = self.sizes, keys.ne[1], x.ne[1]
        seen = cast(mask, TensorType.F32)
        scores = add(self._scores(step, layer, x, low, keys), seen, f"indexer_score-{layer}")
        chosen = argsort_top_k(scores, sizes.n_chosen, f"indexer_top_k-{layer}")
        rows = reshape(scores, 1, n_rows, n_tokens)
        none = fill(rows, -math.inf)
        open_ = set_rows(none, fill(get_rows(rows, chosen), 0.0), chosen)
        return cast(add(reshape(open_, n_rows, n_tokens), seen), TensorType.F16, f"indexer_mask-{layer}")

    def _scores(self, step: Pass, layer: int, x: Tensor, low: Tensor, keys: Tensor) -> Tensor:
        n_head, dim, _ = self.sizes
        n_tokens = x.ne[1]
        q = reshape(self.q(step, low, f"indexer_q-{layer}"), dim, n_head, n_tokens)
        q = self._rotated(step, q, f"indexer_q_pe-{layer}")
        weights = scale(self.weigh(step, x, f"indexer_weights-{layer}"), 1.0 / math.sqrt(dim * n_head))
        return scores(q, keys, weights)

    def _rotated(self, step: Pass, x: Tensor, name: str) -> Tensor:
        """Apply the rotary embedding, then the Hadamard rotation over the greatest power of two that divides `dim`."""
        x, dim = step.rotate(x, self.rope, None, name, offset=self.rope_at), self.sizes.dim
        return rotate_heads(step.input(Hadamard(dim & -dim)), x) if self.hadamard else x


def scores(q: Tensor, keys: Tensor, weights: Tensor | None) -> Tensor:
    """Return Σ over heads of weight · relu(query · key): F32 [rows, n_tokens].

    q is [dim, n_head, n_tokens], `keys` [dim, rows] and `weights` [n_head, n_tokens]; without weights they are 1.
    """
    (dim, n_head, n_tokens, _), n_rows = q.ne, keys.ne[1]
    total = None
    for first in range(0, n_head, _TOGETHER):
        n = min(_TOGETHER, n_head - first)
        some = view_3d(q, dim, n, n_tokens, q.nb[1], q.nb[2], first * q.nb[1])
        products = relu(mul_mat(keys, cont(permute(some, 0, 2, 1, 3))))
        by_token = cont(permute(products, 1, 2, 0, 3))  # [heads, rows, tokens]
        if weights is not None:
            factors = view_2d(weights, n, n_tokens, weights.nb[1], first * weights.nb[0])
            by_token = mul(by_token, reshape(cont(factors), n, 1, n_tokens))
        part = reshape(sum_rows(by_token), n_rows, n_tokens)
        total = part if total is None else add(total, part)
    assert total is not None
    return total


class TokenSelector(Protocol):
    """Selector of the tokens that attention sees, based on `width` elements stored per token.

    It may `pool` the stored elements of several tokens, from a given element on, into `pooled` elements per token.
    """

    @property
    def width(self) -> int: ...

    @property
    def pooled(self) -> int: ...

    def pool(self, step: Pass, layer: int, first: int) -> None: ...

    def key(self, step: Pass, layer: int, x: Tensor) -> Tensor: ...

    def mask(self, step: Pass, layer: int, x: Tensor, low: Tensor, keys: Tensor, mask: Tensor) -> Tensor: ...


class SparseAttention(NamedTuple):
    """Latent attention over the tokens selected by the layer's own indexer, or that of an earlier layer.

    `gate`: gate of the values; `sinks`: see Pass.attend.
    """

    latent: LatentAttention
    indexer: TokenSelector | None
    owner: int
    """Layer of the indexer that selects."""
    n_chosen: int
    gate: OutputGate | None = None
    sinks: Tensor | None = None

    def layer_memory(self) -> LayerMemory:
        """One row for keys and values, followed by the indexer's key."""
        n = self.latent.compressed.sizes.rank + self.latent.compressed.sizes.rope
        return Latent(n) if self.indexer is None else Latent(n + self.indexer.width, pooled=self.indexer.pooled)

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        q, row = self.latent.keys(step, layer, x)
        on_written = None
        if self.indexer is not None:
            on_written = partial(self.indexer.pool, step, layer, row.ne[0])
            row = concat(row, self.indexer.key(step, layer, x), 0)

        def choose(keys: Tensor, mask: Tensor) -> Tensor:
            if mask.ne[0] <= self.n_chosen:  # all tokens are selected
                return mask

            def make() -> Tensor:
                assert self.indexer is not None and isinstance(self.latent.compressed.q, LowRank)
                low = self.latent.compressed.q.hidden(step, x, f"q-{layer}")
                return self.indexer.mask(step, layer, x, low, keys, mask)

            return step.shared(f"indexer_mask-{self.owner}", make)

        rank, factor = self.latent.compressed.sizes.rank, self.latent.scale
        attended = step.attend_latent(layer, q, row, rank, factor, choose, sinks=self.sinks, on_written=on_written)
        if attended is None or self.gate is None:
            return None if attended is None else self.latent.result(step, layer, attended)
        gated = self.gate(step, layer, x, self.latent.values(step, layer, attended))
        return self.latent.out(step, gated, f"attn_out-{layer}")
