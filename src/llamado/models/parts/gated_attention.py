"""Attention with an output gate per head (arXiv 2505.06708), as in Qwen3-Next."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from llamado.ggml.graph import cont, mul, sigmoid, view_3d
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters, Rope
from llamado.models.parts.attention import FusedProjection, Heads, Projections, as_heads, take_projections
from llamado.models.parts.norms import RmsNorm
from llamado.models.parts.pooled_indexer import RunSelector
from llamado.models.weights import RoleWeights


class GatedAttention(NamedTuple):
    """Grouped-query attention with head norms; a row of queries holds each head's query followed by its gate.

    `selector` selects the tokens that are seen; None: all.
    """

    heads: Heads
    project: Projections | FusedProjection
    q_norm: RmsNorm
    k_norm: RmsNorm
    out: Linear
    scale: float
    rope: Rope
    selector: RunSelector | None = None

    @classmethod
    def take(cls, w: RoleWeights, hp: HyperParameters, layer: int) -> GatedAttention:
        """Take `attn_q_norm`, `attn_k_norm`, `attn_output` and the weights of `take_projections`. Raises InvalidModel.

        The query projection has twice as many rows, for the gates.
        """
        heads = Heads.of(hp, layer)
        return cls(
            heads=heads,
            project=take_projections(w, hp.n_embd, heads._replace(n=2 * heads.n)),
            q_norm=RmsNorm.take(w, "attn_q_norm", heads.dim_k),
            k_norm=RmsNorm.take(w, "attn_k_norm", heads.dim_k),
            out=w.linear("attn_output", heads.n * heads.dim_v, hp.n_embd),
            scale=hp.attention_scale,
            rope=hp.rope,
        )

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        h, n_tokens = self.heads, x.ne[1]
        both, k, v = self.project(step, layer, x)
        both = as_heads(both, 2 * h.dim_k, h.n, n_tokens, f"Qcur_full-{layer}")
        q, gate = (view_3d(both, h.dim_k, h.n, n_tokens, *both.nb[1:3], at * both.nb[0]) for at in (0, h.dim_k))
        q = self.q_norm(step, q, f"Qcur_normed-{layer}")
        k = self.k_norm(step, as_heads(k, h.dim_k, h.n_kv, n_tokens, f"Kcur-{layer}"), f"Kcur_normed-{layer}")
        v = as_heads(v, h.dim_v, h.n_kv, n_tokens, f"Vcur-{layer}")
        q, k = (step.rotate(t, self.rope, None, f"{name}-{layer}") for t, name in ((q, "Qcur"), (k, "Kcur")))
        if self.selector is None:
            attended = step.attend(layer, q, k, v, self.scale)
        else:
            index, choose = self.selector.key(step, layer, x), partial(self.selector.mask, step, layer, x)
            on_written = partial(self.selector.pool, step, layer)
            attended = step.attend(layer, q, k, v, self.scale, index=index, choose=choose, on_written=on_written)
        if attended is None:
            return None
        gate = sigmoid(cont(gate, h.dim_k * h.n, n_tokens, name=f"gate-{layer}"), f"gate_sigmoid-{layer}")
        return self.out(step, mul(attended, gate, f"attn_gated-{layer}"), f"attn_output-{layer}")
