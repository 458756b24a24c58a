"""Standard decoder attention: query, key and value projections, head norms, and rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from llamado.ggml.graph import add, clamp, mul, reshape, scale, unary, view_2d, view_3d
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Linear, LongRopeFactors, Pass, Projection
from llamado.models.hparams import HyperParameters, Rope, Temperature
from llamado.models.parts.norms import Norm, RmsNorm
from llamado.models.weights import RoleWeights


class Mixer(Protocol):
    """Token mixer of a layer (attention or recurrence); returns None if only the memory is needed (see Pass.attend)."""

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None: ...


class Heads(NamedTuple):
    """Number of query heads and KV heads of a layer, and the elements of a key and a value head."""

    n: int
    n_kv: int
    dim_k: int
    dim_v: int

    @classmethod
    def of(cls, hp: HyperParameters, layer: int) -> Heads:
        return cls(hp.n_head[layer], hp.n_head_kv[layer], hp.head_dim_k, hp.head_dim_v)


class HeadProjection(Protocol):
    """Query, key and value projections; each returns the heads of a token in one row."""

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


class Projections(NamedTuple):
    """Separate query, key and value matrices."""

    q: Linear
    k: Linear
    v: Linear

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(step, x, f"Qcur-{layer}"), self.k(step, x, f"Kcur-{layer}"), self.v(step, x, f"Vcur-{layer}")


class FusedProjection(NamedTuple):
    """One matrix whose rows are those of the queries, the keys and the values.

    `biases` are separate biases, for files without one for the whole matrix.
    """

    qkv: Linear
    n_q: int
    n_k: int
    n_v: int
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.qkv(step, x, f"wqkv-{layer}")
        n_tokens, size = y.ne[1], y.nb[0]
        q = view_2d(y, self.n_q, n_tokens, y.nb[1])
        k = view_2d(y, self.n_k, n_tokens, y.nb[1], self.n_q * size)
        v = view_2d(y, self.n_v, n_tokens, y.nb[1], (self.n_q + self.n_k) * size)
        bias_q, bias_k, bias_v = self.biases
        return (
            q if bias_q is None else add(q, bias_q, f"Qcur-{layer}"),
            k if bias_k is None else add(k, bias_k, f"Kcur-{layer}"),
            v if bias_v is None else add(v, bias_v, f"Vcur-{layer}"),
        )


def take_fused(w: RoleWeights, n_embd: int, heads: Heads) -> FusedProjection | None:
    """Take `attn_qkv`, with its bias or those of `attn_q`, `attn_k` and `attn_v`; return None if it is missing.

    Raises InvalidModel.
    """
    n_q, n_k, n_v = heads.dim_k * heads.n, heads.dim_k * heads.n_kv, heads.dim_v * heads.n_kv
    if not w.has("attn_qkv.weight"):
        return None
    qkv = w.linear("attn_qkv", n_embd, n_q + n_k + n_v)
    if qkv.bias is not None:
        return FusedProjection(qkv, n_q, n_k, n_v)
    biases = w.optional("attn_q.bias", n_q), w.optional("attn_k.bias", n_k), w.optional("attn_v.bias", n_v)
    return FusedProjection(qkv, n_q, n_k, n_v, biases)


def take_projections(w: RoleWeights, n_embd: int, heads: Heads) -> Projections | FusedProjection:
    """Take `attn_qkv`, or `attn_q`, `attn_k` and `attn_v`, with any biases. Raises InvalidModel."""
    fused = take_fused(w, n_embd, heads)
    if fused is not None:
        return fused
    return Projections(
        w.linear("attn_q", n_embd, heads.dim_k * heads.n),
        w.linear("attn_k", n_embd, heads.dim_k * heads.n_kv),
        w.linear("attn_v", n_embd, heads.dim_v * heads.n_kv),
    )


class AttentionMatrices(NamedTuple):
    """Query, key and value projections, and the output projection."""

    heads: Heads
    project: HeadProjection
    out: Projection

    @classmethod
    def take(cls, w: RoleWeights, hp: HyperParameters, layer: int) -> AttentionMatrices:
        """Take `attn_output` and the weights of `take_projections`. Raises InvalidModel."""
        heads = Heads.of(hp, layer)
        project = take_projections(w, hp.n_embd, heads)
        return cls(heads, project, w.linear("attn_output", heads.n * heads.dim_v, hp.n_embd))


class QkNorm(Enum):
    """Norms of queries and keys, `attn_q_norm` and `attn_k_norm`: RMS norms of heads or of whole rows."""

    NONE = "none"
    HEADS = "heads"
    HEADS_AFTER_ROPE = "heads, after the rotation"
    ROWS = "rows"

    def take(self, w: RoleWeights, heads: Heads) -> tuple[Norm | None, Norm | None]:
        """Take the norms of queries and keys. Raises InvalidModel."""
        if self is QkNorm.NONE:
            return None, None
        n_q, n_k = (heads.n, heads.n_kv) if self is QkNorm.ROWS else (1, 1)
        return (
            RmsNorm.take(w, "attn_q_norm", n_q * heads.dim_k),
            RmsNorm.take(w, "attn_k_norm", n_k * heads.dim_k),
        )


class OutputGate(NamedTuple):
    """Gate of the attention output: an activated projection of the attention input (arXiv 2505.06708).

    The projection has one output per element, or one per head (`n_head`).
    """

    project: Linear
    n_head: int
    activation: UnaryOp = UnaryOp.SIGMOID

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, heads: Heads, activation: UnaryOp = UnaryOp.SIGMOID) -> OutputGate:
        """Take `attn_gate`. Raises InvalidModel."""
        n = w.ne("attn_gate.weight")[1]
        return cls(
            w.linear("attn_gate", n_embd, n if n == heads.n else heads.n * heads.dim_v),
            heads.n,
            activation,
        )

    def __call__(self, step: Pass, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        gate = unary(self.project(step, x, f"attn_gate-{layer}"), self.activation, f"attn_gate_act-{layer}")
        width, n_tokens = attended.ne[:2]
        if gate.ne[0] == width:
            return mul(attended, gate, f"attn_gated-{layer}")
        heads = reshape(attended, width // self.n_head, self.n_head, n_tokens)
        gated = mul(heads, reshape(gate, 1, self.n_head, n_tokens), f"attn_gated-{layer}")
        return reshape(gated, width, n_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention (arXiv 2305.13245) with rotary positions (arXiv 2104.09864).

    - `rope`: rotary embedding, None for none; `factors`: divisors of its frequencies.
    - `q_norm`, `k_norm`: norms of heads, or of whole rows with `norm_rows`; before the rotation, or after it with
      `norm_after_rope`.
    - `scale`: factor of query-key products, applied to the queries themselves with `scale_queries`.
    - `clamp`: maximum magnitude of queries, keys and values; 0: none.
    - `temperature`: position-dependent factor of queries.
    - `softcap`, `sinks`, `max_bias`, `bias`: see Pass.attend.
    - `gate`: gate of the attention output.
    """

    matrices: AttentionMatrices
    scale: float
    rope: Rope | None
    factors: Tensor | LongRopeFactors | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    norm_rows: bool = False
    norm_after_rope: bool = False
    scale_queries: bool = False
    clamp: float = 0.0
    softcap: float = 0.0
    sinks: Tensor | None = None
    max_bias: float = 0.0
    bias: Tensor | None = None
    temperature: Temperature | None = None
    gate: OutputGate | None = None

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        heads, project, out = self.matrices
        n_tokens = x.ne[1]
        q, k, v = project(step, layer, x)
        if self.clamp:
            q, k, v = (clamp(each, -self.clamp, self.clamp) for each in (q, k, v))
        if self.norm_rows:
            q, k = self._normed(step, layer, q, k)
        q = as_heads(q, heads.dim_k, heads.n, n_tokens, f"Qcur-{layer}")
        k = as_heads(k, heads.dim_k, heads.n_kv, n_tokens, f"Kcur-{layer}")
        v = as_heads(v, heads.dim_v, heads.n_kv, n_tokens, f"Vcur-{layer}")
        if not (self.norm_rows or self.norm_after_rope):
            q, k = self._normed(step, layer, q, k)
        if self.rope is not None:
            q = step.rotate(q, self.rope, self.factors, f"Qcur-{layer}")
            k = step.rotate(k, self.rope, self.factors, f"Kcur-{layer}")
        if self.norm_after_rope:
            q, k = self._normed(step, layer, q, k)
        if self.temperature is not None:
            q = mul(q, step.temperature(*self.temperature), f"Qcur_temp-{layer}")
        factor = self.scale
        if self.scale_queries:
            q, factor = scale(q, factor), 1.0
        softcap, max_bias = self.softcap, self.max_bias
        attended = step.attend(
            layer, q, k, v, factor, softcap=softcap, sinks=self.sinks, max_bias=max_bias, bias=self.bias
        )
        if attended is None:
            return None
        if self.gate is not None:
            attended = self.gate(step, layer, x, attended)
        return out(step, attended, f"attn_out-{layer}")

    def _normed(self, step: Pass, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None:
            q = self.q_norm(step, q, f"Qcur_normed-{layer}")
        if self.k_norm is not None:
            k = self.k_norm(step, k, f"Kcur_normed-{layer}")
        return q, k


def as_heads(x: Tensor, dim: int, n_head: int, n_tokens: int, name: str) -> Tensor:
    """Return rows as [dim, n_head, n_tokens]; a part of wider rows becomes a view."""
    if x.is_contiguous():
        return reshape(x, dim, n_head, n_tokens, name=name)
    return view_3d(x, dim, n_head, n_tokens, dim * x.nb[0], x.nb[1], name=name)
