"""Block-sparse attention (MiniMax Sparse Attention): an indexer head per KV head selects the token blocks it sees."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from llamado.ggml.graph import (
    add,
    argmax,
    argsort_top_k,
    cast,
    cont,
    fill,
    get_rows,
    mul_mat,
    repeat,
    reshape,
    set_rows,
    view_2d,
)
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.batch import Batch
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import Rope
from llamado.models.inputs import Bytes, Input
from llamado.models.memory import KeysValues, LayerMemory
from llamado.models.parts.attention import AttentionMatrices, as_heads
from llamado.models.parts.norms import Norm, RmsNorm
from llamado.models.weights import RoleWeights

_FIRST = np.float32(1e30)
"""Greater than any score: added to the scores of blocks that are always seen."""


class BlockSizes(NamedTuple):
    """Indexer heads, their size, tokens per block, and blocks selected per head.

    The last `n_local` blocks up to the token's own are always selected.
    """

    n_head: int
    dim: int
    block: int
    n_chosen: int
    n_local: int


class LocalBlocks(Input):
    """F32 [n_blocks, n_tokens]: bonus for the scores of the blocks that a token always sees."""

    def __init__(self, n_blocks: int, n_tokens: int, sizes: BlockSizes, part: int) -> None:
        super().__init__("local_blocks", TensorType.F32, n_blocks, n_tokens)
        self._sizes, self._part = sizes, part

    def fill(self, batch: Batch) -> Bytes:
        rows, size = batch.memory[self._part], self._sizes.block
        whole = np.zeros((self.ne[1], self.ne[0]), np.float32)
        least = rows.written // size - self._sizes.n_local + 1
        for added, begin, own in zip(whole, np.maximum(least, rows.first // size), rows.written // size, strict=False):
            added[begin : own + 1] = _FIRST
        for start, stop, row_ranges in rows.prefixes:
            for token in range(start, stop):
                skip = least[token] - rows.origins[token] // size
                for row, n in row_ranges:
                    whole[token, (row // size) + max(skip, 0) : (row + n) // size] = _FIRST
                    skip -= n // size
        return whole.reshape(-1).view(np.uint8)


class BlockIndexer(NamedTuple):
    """Indexer whose score of a block is the maximum query-key product in it."""

    sizes: BlockSizes
    q: Linear
    k: Linear
    q_norm: RmsNorm
    k_norm: RmsNorm
    rope: Rope

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, sizes: BlockSizes, rope: Rope) -> BlockIndexer:
        """Take `indexer.q_proj`, `indexer.k_proj`, `indexer.q_norm` and `indexer.k_norm`. Raises InvalidModel."""
        return cls(
            sizes,
            w.linear("indexer.q_proj", n_embd, sizes.n_head * sizes.dim),
            w.linear("indexer.k_proj", n_embd, sizes.dim),
            RmsNorm.take(w, "indexer.q_norm", sizes.dim),
            RmsNorm.take(w, "indexer.k_norm", sizes.dim),
            rope,
        )

    def key(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        """Return the indexer keys of tokens, [dim, n_tokens]."""
        dim, n_tokens = self.sizes.dim, x.ne[1]
        k = reshape(self.k(step, x, f"indexer_k-{layer}"), dim, 1, n_tokens)
        k = self.k_norm(step, k, f"indexer_k_norm-{layer}")
        return reshape(step.rotate(k, self.rope, None, f"indexer_k_pe-{layer}"), dim, n_tokens)

    def masks(self, step: Pass, layer: int, x: Tensor, keys: Tensor, mask: Tensor, part: int) -> list[Tensor]:
        """Return a mask per head, F16 [rows, n_tokens]: `mask`, with minus infinity for rows in blocks not selected.

        `keys` are [dim, rows]. If all blocks are selected, return one mask for all heads.
        """
        (n_head, dim, block, n_chosen, _), (n_rows, n_tokens) = self.sizes, mask.ne[:2]
        n_blocks = n_rows // block
        if n_blocks <= n_chosen:
            return [mask]
        seen = step.shared(f"{mask.name}_f32", lambda: cast(mask, TensorType.F32))
        local = step.input(LocalBlocks(n_blocks, n_tokens, self.sizes, part))
        q = reshape(self.q(step, x, f"indexer_q-{layer}"), dim, n_head, n_tokens)
        q = self.q_norm(step, q, f"indexer_q_norm-{layer}")
        q = step.rotate(q, self.rope, None, f"indexer_q_pe-{layer}")
        found = []
        for head in range(n_head):
            one = cont(view_2d(q, dim, n_tokens, q.nb[2], head * q.nb[1]))
            scores = reshape(add(mul_mat(keys, one), seen), 1, block, n_blocks * n_tokens)
            best = reshape(argmax(reshape(scores, block, n_blocks * n_tokens)), 1, n_blocks * n_tokens)
            best = reshape(get_rows(scores, best), n_blocks, n_tokens, name=f"indexer_score-{layer}")
            chosen = argsort_top_k(add(best, local), n_chosen, f"indexer_top_k-{layer}")
            rows = reshape(best, 1, n_blocks, n_tokens)
            open_ = set_rows(fill(rows, -math.inf), fill(get_rows(rows, chosen), 0.0), chosen)
            open_ = reshape(repeat(open_, block, n_blocks, n_tokens, 1), n_rows, n_tokens)
            found.append(cast(add(open_, seen), TensorType.F16, f"indexer_mask-{layer}"))
        return found


class BlockAttention(NamedTuple):
    """Grouped-query attention in which each KV head sees the token blocks selected by its indexer head."""

    matrices: AttentionMatrices
    scale: float
    rope: Rope
    q_norm: Norm
    k_norm: Norm
    indexer: BlockIndexer

    def layer_memory(self) -> LayerMemory:
        """Keys followed by the indexer's keys, and values."""
        heads, sizes = self.matrices.heads, self.indexer.sizes
        n_k, n_v = heads.n_kv * heads.dim_k, heads.n_kv * heads.dim_v
        return KeysValues(n_k + sizes.dim, n_v, head_k=heads.dim_k, head_v=heads.dim_v, block=sizes.block)

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        heads, project, out = self.matrices
        n_tokens = x.ne[1]
        q, k, v = project(step, layer, x)
        q = as_heads(q, heads.dim_k, heads.n, n_tokens, f"Qcur-{layer}")
        k = as_heads(k, heads.dim_k, heads.n_kv, n_tokens, f"Kcur-{layer}")
        v = as_heads(v, heads.dim_v, heads.n_kv, n_tokens, f"Vcur-{layer}")
        q = step.rotate(self.q_norm(step, q, f"Qcur_normed-{layer}"), self.rope, None, f"Qcur_pos-{layer}")
        k = step.rotate(self.k_norm(step, k, f"Kcur_normed-{layer}"), self.rope, None, f"Kcur_pos-{layer}")

        def choose(keys: Tensor, mask: Tensor, part: int) -> list[Tensor]:
            return self.indexer.masks(step, layer, x, keys, mask, part)

        extra = self.indexer.key(step, layer, x)
        attended = step.attend_per_head(layer, q, k, v, extra, self.scale, choose)
        return None if attended is None else out(step, attended, f"attn_out-{layer}")
