"""Attention of layers that share keys and values (Gemma 3n and 4)."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.tensor import Tensor
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import Rope
from llamado.models.parts.attention import FusedProjection, Heads, as_heads, take_fused
from llamado.models.parts.norms import RmsNorm, UnitNorm
from llamado.models.weights import RoleWeights


class SharedKvProjections(NamedTuple):
    """Projections of a layer: without `k` it computes no keys and values, without `v` the values are the keys."""

    q: Linear
    k: Linear | None
    v: Linear | None

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, heads: Heads, *, shares: bool) -> SharedKvProjections:
        """Take `attn_q` and, unless the layer shares another's, `attn_k` and optional `attn_v`. Raises InvalidModel."""
        q = w.linear("attn_q", n_embd, heads.n * heads.dim_k)
        if shares:  # files of Gemma 3n contain them anyway
            w.ignore("attn_k.weight", "attn_v.weight")
            return cls(q, None, None)
        k = w.linear("attn_k", n_embd, heads.n_kv * heads.dim_k)
        return cls(q, k, w.linear("attn_v", n_embd, heads.n_kv * heads.dim_v) if w.has("attn_v.weight") else None)

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        q = self.q(step, x, f"Qcur-{layer}")
        k = None if self.k is None else self.k(step, x, f"Kcur-{layer}")
        return q, k, k if self.v is None else self.v(step, x, f"Vcur-{layer}")


class SharedKvAttention(NamedTuple):
    """Attention over a layer's own keys and values, or without `k_norm` over those of an earlier layer."""

    heads: Heads
    project: SharedKvProjections | FusedProjection
    q_norm: RmsNorm
    k_norm: RmsNorm | None
    out: Linear
    rope: Rope
    factors: Tensor | None

    @classmethod
    def take(
        cls, w: RoleWeights, n_embd: int, heads: Heads, rope: Rope, factors: Tensor | None, *, shares: bool
    ) -> SharedKvAttention:
        """Take the projections, `attn_q_norm`, `attn_output` and, unless it shares, `attn_k_norm`. Raises InvalidModel.

        The projections are `attn_qkv` or those of OwnProjections.
        """
        fused = take_fused(w, n_embd, heads)
        if shares:
            w.ignore("attn_k_norm.weight")
        return cls(
            heads,
            SharedKvProjections.take(w, n_embd, heads, shares=shares) if fused is None else fused,
            RmsNorm.take(w, "attn_q_norm", heads.dim_k),
            None if shares else RmsNorm.take(w, "attn_k_norm", heads.dim_k),
            w.linear("attn_output", heads.n * heads.dim_v, n_embd),
            rope,
            factors,
        )

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        heads, n, i = self.heads, x.ne[1], layer
        q, k, v = self.project(step, i, x)
        q = as_heads(q, heads.dim_k, heads.n, n, f"Qcur-{i}")
        q = step.rotate(self.q_norm(step, q, f"Qcur_normed-{i}"), self.rope, self.factors, f"Qcur_pos-{i}")
        if self.k_norm is None:
            attended = step.attend_shared(i, q, heads.n_kv, 1.0)
        else:
            assert k is not None and v is not None
            k = as_heads(k, heads.dim_k, heads.n_kv, n, f"Kcur-{i}")
            v = UnitNorm()(step, as_heads(v, heads.dim_v, heads.n_kv, n, f"Vcur-{i}"), f"Vcur_normed-{i}")
            k = step.rotate(self.k_norm(step, k, f"Kcur_normed-{i}"), self.rope, self.factors, f"Kcur_pos-{i}")
            attended = step.attend(i, q, k, v, 1.0)
        return None if attended is None else self.out(step, attended, f"attn_out-{i}")
