"""Mixtures of experts in encoders (clip.cpp, build_moe_ffn)."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import (
    add,
    argsort_top_k,
    div,
    get_rows,
    mul,
    mul_mat,
    mul_mat_id,
    reshape,
    sigmoid,
    sum_rows,
    swiglu_split,
    view_2d,
)
from llamado.ggml.tensor import Tensor
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.weights import RoleWeights


class EncoderExperts(NamedTuple):
    """Feed-forward networks of which each position uses `n_used`; their weights are normed sigmoids."""

    router: Tensor
    bias: Tensor | None
    gate: Tensor
    up: Tensor
    down: Tensor
    n_used: int

    @classmethod
    def take(cls, w: RoleWeights, n: int, n_used: int) -> EncoderExperts:
        """Take the experts of a layer. Raises InvalidModel."""
        _, n_ff, n_experts = w.ne("ffn_gate_exps.weight")[:3]
        n_used = min(n_used, n_experts)
        experts = w.experts(n_experts, n_used)
        return cls(
            w.require("ffn_gate_inp.weight", n, n_experts),
            w.optional("exp_probs_b.weight", n_experts),
            experts.require("ffn_gate_exps.weight", n, n_ff, n_experts),
            experts.require("ffn_up_exps.weight", n, n_ff, n_experts),
            experts.require("ffn_down_exps.weight", n_ff, n, n_experts),
            n_used,
        )

    def __call__(self, step: EncoderPass, x: Tensor, name: str) -> Tensor:
        (n, n_positions), n_experts = x.ne[:2], self.router.ne[1]
        shares = sigmoid(mul_mat(self.router, x), f"ffn_moe_probs-{name}")
        ranks = shares if self.bias is None else add(shares, self.bias)
        chosen = argsort_top_k(ranks, self.n_used)
        weights = reshape(get_rows(reshape(shares, 1, n_experts, n_positions), chosen), self.n_used, n_positions)
        weights = reshape(div(weights, sum_rows(weights)), 1, self.n_used, n_positions)
        rows = reshape(x, n, 1, n_positions)
        h = swiglu_split(mul_mat_id(self.gate, rows, chosen), mul_mat_id(self.up, rows, chosen))
        h = mul(mul_mat_id(self.down, h, chosen), weights, f"ffn_moe_weighted-{name}")
        parts = [view_2d(h, n, n_positions, h.nb[2], i * h.nb[1]) for i in range(self.n_used)]
        out = parts[0]
        for part in parts[1:]:
            out = add(out, part)
        return out
