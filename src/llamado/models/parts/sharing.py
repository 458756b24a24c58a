"""Attention of layers that share keys and values (Gemma 3n and 4)."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import reshape
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import Rope
from llamado.models.parts.attention import Heads
from llamado.models.parts.norms import RmsNorm, UnitNorm
from llamado.models.weights import RoleWeights


class KeysAndValues(NamedTuple):
    """What makes keys and values; without `v` values are the keys before their norm."""

    k: Linear
    v: Linear | None
    k_norm: RmsNorm


class SharingAttention(NamedTuple):
    """Attention over a layer's own keys and values, or without any over those of an earlier layer."""

    heads: Heads
    q: Linear
    q_norm: RmsNorm
    own: KeysAndValues | None
    out: Linear
    rope: Rope
    factors: Tensor | None

    @classmethod
    def take(
        cls, w: RoleWeights, n_embd: int, heads: Heads, rope: Rope, factors: Tensor | None, *, shares: bool
    ) -> SharingAttention:
        """`attn_q`, `attn_k`, perhaps `attn_v`, `attn_q_norm`, `attn_k_norm` and `attn_output`. Raises InvalidModel."""
        own = None
        if shares:  # files of Gemma 3n have them all the same
            w.leave("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
        else:
            k = w.linear("attn_k", n_embd, heads.n_kv * heads.dim_k)
            v = w.linear("attn_v", n_embd, heads.n_kv * heads.dim_v) if w.has("attn_v.weight") else None
            own = KeysAndValues(k, v, RmsNorm.take(w, "attn_k_norm", heads.dim_k))
        return cls(
            heads,
            w.linear("attn_q", n_embd, heads.n * heads.dim_k),
            RmsNorm.take(w, "attn_q_norm", heads.dim_k),
            own,
            w.linear("attn_output", heads.n * heads.dim_v, n_embd),
            rope,
            factors,
        )

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        heads, n, i = self.heads, x.ne[1], layer
        q = reshape(self.q(step, x, f"Qcur-{i}"), heads.dim_k, heads.n, n)
        q = step.rotate(self.q_norm(step, q, f"Qcur_normed-{i}"), self.rope, self.factors, f"Qcur_pos-{i}")
        if self.own is None:
            attended = step.attend_shared(i, q, heads.n_kv, 1.0)
        else:
            k = self.own.k(step, x, f"Kcur-{i}")
            v = k if self.own.v is None else self.own.v(step, x, f"Vcur-{i}")
            k, v = reshape(k, heads.dim_k, heads.n_kv, n), reshape(v, heads.dim_v, heads.n_kv, n)
            k = step.rotate(self.own.k_norm(step, k, f"Kcur_normed-{i}"), self.rope, self.factors, f"Kcur_pos-{i}")
            attended = step.attend(i, q, k, UnitNorm()(step, v, f"Vcur_normed-{i}"), 1.0)
        return None if attended is None else self.out(step, attended, f"attn_out-{i}")
