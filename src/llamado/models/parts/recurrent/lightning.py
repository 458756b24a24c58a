"""Lightning attention (arXiv 2401.04658): linear attention with a fixed decay rate per head."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llamado.ggml.graph import (
    cont,
    exp,
    gated_linear_attn,
    mul,
    repeat,
    reshape,
    scale,
    sigmoid,
    silu,
    view_2d,
    view_3d,
)
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.batch import Batch
from llamado.models.forward import Linear, Pass
from llamado.models.inputs import Bytes, Constant
from llamado.models.memory import RecurrentState
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class Slopes(Constant):
    """F32 [1, n_head]: 2^(-8 (h + 1) / n_head) for head h, the slopes of ALiBi (arXiv 2108.12409)."""

    def __init__(self, n_head: int) -> None:
        super().__init__("slopes", TensorType.F32, 1, n_head)

    def fill(self, batch: Batch) -> Bytes:
        n_head = self.ne[1]
        return np.exp2(-8.0 * np.arange(1, n_head + 1) / n_head).astype(np.float32).view(np.uint8)


class LightningAttention(NamedTuple):
    """Lightning attention: a head's state is a decaying sum of key-value outer products.

    Each token multiplies the state by e^(-slope · `rate`). The outputs of all heads are normed as one row and gated.
    """

    head: int
    n_heads: int
    rate: float
    qkv: Linear
    gate: Linear
    norm: RmsNorm
    out: Linear

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, head: int, n_heads: int, rate: float) -> LightningAttention:
        """Take `attn_qkv` (query, key and value per head), `attn_gate`, `attn_norm_2` and `attn_output`.

        Raises InvalidModel.
        """
        n = head * n_heads
        return cls(
            head=head,
            n_heads=n_heads,
            rate=rate,
            qkv=w.linear("attn_qkv", n_embd, 3 * n),
            gate=w.linear("attn_gate", n_embd, n),
            norm=RmsNorm.take(w, "attn_norm_2", n),
            out=w.linear("attn_output", n, n_embd),
        )

    def layer_memory(self) -> RecurrentState:
        return RecurrentState((self.head * self.head * self.n_heads,))

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        n_tokens, n = x.ne[1], self.head * self.n_heads
        y = silu(self.qkv(step, x, f"QKVcur-{layer}"), f"QKVcur_silu-{layer}")
        row = 3 * self.head * y.nb[0]
        q, k, v = (
            step.graph.expand(cont(view_3d(y, self.head, self.n_heads, n_tokens, row, y.nb[1], i * row // 3)))
            for i in range(3)
        )
        slopes = step.input(Slopes(self.n_heads))
        decay = reshape(exp(scale(slopes, -self.rate)), 1, self.n_heads, 1)
        decays = step.graph.expand(repeat(decay, self.head, self.n_heads, n_tokens, 1))
        gate = step.graph.expand(sigmoid(self.gate(step, x, f"g-{layer}"), f"g_sigm-{layer}"))
        both = gated_linear_attn(k, v, q, decays, step.read_states(layer, 0), 1.0, f"qkv-{layer}")
        width = n * self.head
        step.store_states(layer, 0, view_2d(both, width, step.n_seqs, width * both.nb[0], n_tokens * both.nb[1]))
        if step.is_cache_only(layer):
            return None
        found = self.norm(step, view_2d(both, n, n_tokens, both.nb[1]), f"qkv_norm-{layer}")
        return self.out(step, mul(gate, found), f"attn_out-{layer}")
