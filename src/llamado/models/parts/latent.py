"""Multi-head latent attention (MLA, arXiv 2405.04434): one short row per token for the keys and values of all heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llamado.ggml.graph import concat, cont, mul, permute, repeat, reshape, view_2d, view_3d
from llamado.ggml.tensor import Tensor
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear, LongRopeFactors, Pass
from llamado.models.hparams import HyperParameters, Rope, Temperature
from llamado.models.keys import Keys
from llamado.models.memory import KeysValues, Latent, LayerMemory
from llamado.models.parts.attention import OutputGate
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class LowRank(NamedTuple):
    """A low-rank matrix with a norm between its factors."""

    a: Linear
    norm: RmsNorm
    b: Linear

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        return self.b(step, self.hidden(step, x, name), name)

    def hidden(self, step: Pass, x: Tensor, name: str) -> Tensor:
        """Return the normed output of the first factor, computed once per name."""
        return step.shared(f"{name}_norm", lambda: self.norm(step, self.a(step, x, f"{name}_a"), f"{name}_norm"))


class LatentSizes(NamedTuple):
    """Number of heads and sizes of their parts.

    `nope` and `rope`: unrotated and rotated elements of a query or key head; `value`: of a value head; `rank`: of the
    latent row.
    """

    n_head: int
    nope: int
    rope: int
    value: int
    rank: int

    @classmethod
    def read(cls, keys: Keys, hp: HyperParameters) -> LatentSizes:
        """Read the sizes from a file; head sizes without a key of their own are those of `hp`.

        Raises GgufError or InvalidModel.
        """
        dim = keys.int_("attention.key_length_mla", hp.head_dim_k)
        if dim <= hp.rope.n_dims:
            raise InvalidModel(
                f"metadata key '{keys.name('rope.dimension_count')}' is {hp.rope.n_dims} of heads of {dim} elements; "
                "fewer are expected"
            )
        value = keys.int_("attention.value_length_mla", hp.head_dim_v)
        return cls(hp.n_head[0], dim - hp.rope.n_dims, hp.rope.n_dims, value, keys.int_("attention.kv_lora_rank"))

    @property
    def key(self) -> int:
        return self.nope + self.rope


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentProjection:
    """Projections common to all forms of latent attention: queries, latent row, and rotated part of the keys.

    `rope` None: no part is rotated; `k_norm`: norm of the rotated part of keys, before rotation.
    """

    sizes: LatentSizes
    q: Linear | LowRank
    row: Linear
    norm: RmsNorm
    rope: Rope | None
    temperature: Temperature | None
    factors: Tensor | LongRopeFactors | None = None
    k_norm: RmsNorm | None = None

    @classmethod
    def take(
        cls,
        w: RoleWeights,
        n_embd: int,
        sizes: LatentSizes,
        q_rank: int,
        rope: Rope | None,
        temperature: Temperature | None = None,
        factors: Tensor | LongRopeFactors | None = None,
    ) -> LatentProjection:
        """Take `attn_q`, or `attn_q_a`, `attn_q_a_norm` and `attn_q_b`; `attn_kv_a_mqa` and `attn_kv_a_norm`.

        Raises InvalidModel.
        """
        n_q = sizes.n_head * sizes.key
        q: Linear | LowRank
        if w.has("attn_q.weight"):
            q = w.linear("attn_q", n_embd, n_q)
        else:
            norm = RmsNorm.take(w, "attn_q_a_norm", q_rank)
            q = LowRank(w.linear("attn_q_a", n_embd, q_rank), norm, w.linear("attn_q_b", q_rank, n_q))
        return cls(
            sizes=sizes,
            q=q,
            row=w.linear("attn_kv_a_mqa", n_embd, sizes.rank + sizes.rope),
            norm=RmsNorm.take(w, "attn_kv_a_norm", sizes.rank),
            rope=rope,
            temperature=temperature,
            factors=factors,
        )

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return queries, latent rows [rank, n_tokens], and the rotated part of keys [rope, 1, n_tokens], if any.

        Queries are [key, n_head, n_tokens].
        """
        s, n_tokens = self.sizes, x.ne[1]
        q = reshape(self.q(step, x, f"q-{layer}"), s.key, s.n_head, n_tokens)
        both = self.row(step, x, f"kv_cmpr_pe-{layer}")
        size, stride = both.nb[0], both.nb[1]
        latent = self.norm(step, view_2d(both, s.rank, n_tokens, stride), f"kv_cmpr-{layer}")
        if not s.rope:
            return q, latent, None
        k = view_3d(both, s.rope, 1, n_tokens, stride, stride, s.rank * size)
        if self.k_norm is not None:
            k = self.k_norm(step, k, f"k_pe_norm-{layer}")
        return q, latent, cont(k) if self.rope is None else self.rotate(step, k, f"k_pe-{layer}")

    def rotate(self, step: Pass, x: Tensor, name: str, *, offset: int = 0) -> Tensor:
        """Apply the rotary embedding to heads from element `offset` on."""
        return x if self.rope is None else step.rotate(x, self.rope, self.factors, name, offset=offset)

    def apply_temperature(self, step: Pass, q: Tensor) -> Tensor:
        """Multiply queries by their position-dependent temperature."""
        return q if self.temperature is None else mul(q, step.temperature(*self.temperature))


class LatentAttention(NamedTuple):
    """Attention over the latent rows themselves.

    The key projection is absorbed into the queries, the value projection is applied to the attention output.
    """

    compressed: LatentProjection
    k_b: Tensor
    v_b: Tensor
    out: Linear
    scale: float

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, compressed: LatentProjection, scale: float) -> LatentAttention:
        """Take `attn_k_b`, `attn_v_b` and `attn_output`. Raises InvalidModel."""
        s = compressed.sizes
        return cls(
            compressed,
            w.require("attn_k_b.weight", s.nope, s.rank, s.n_head),
            w.require("attn_v_b.weight", s.rank, s.value, s.n_head),
            w.linear("attn_output", s.n_head * s.value, n_embd),
            scale,
        )

    def layer_memory(self) -> LayerMemory:
        """One row for keys and values."""
        return Latent(self.compressed.sizes.rank + self.compressed.sizes.rope)

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        q, row = self.keys(step, layer, x)
        attended = step.attend_latent(layer, q, row, self.compressed.sizes.rank, self.scale)
        return None if attended is None else self.result(step, layer, attended)

    def keys(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [rank + rope, n_head, n_tokens] and rows [rank + rope, n_tokens]."""
        s, n_tokens = self.compressed.sizes, x.ne[1]
        q, latent, k = self.compressed(step, layer, x)
        plain = view_3d(q, s.nope, s.n_head, n_tokens, q.nb[1], q.nb[2])
        absorbed = step.mul_mat(self.k_b, permute(plain, 0, 2, 1, 3), f"q_nope_absorbed-{layer}")
        if k is None:
            return self.compressed.apply_temperature(step, cont(permute(absorbed, 0, 2, 1, 3))), latent
        rotate = view_3d(q, s.rope, s.n_head, n_tokens, q.nb[1], q.nb[2], s.nope * q.nb[0])
        rotate = self.compressed.rotate(step, rotate, f"q_pe-{layer}")
        q = self.compressed.apply_temperature(step, concat(permute(absorbed, 0, 2, 1, 3), rotate, 0))
        return q, concat(latent, reshape(k, s.rope, n_tokens), 0)

    def result(self, step: Pass, layer: int, attended: Tensor) -> Tensor:
        """Project the attention output to the hidden state."""
        return self.out(step, self.values(step, layer, attended), f"attn_out-{layer}")

    def values(self, step: Pass, layer: int, attended: Tensor) -> Tensor:
        """Return the values of all heads in the attention output: [value × n_head, n_tokens]."""
        s, n_tokens = self.compressed.sizes, attended.ne[1]
        by_head = permute(reshape(attended, s.rank, s.n_head, n_tokens), 0, 2, 1, 3)
        values = permute(step.mul_mat(self.v_b, by_head, f"fattn_mla-{layer}"), 0, 2, 1, 3)
        return reshape(cont(values), s.value * s.n_head, n_tokens)


class GatedLatentAttention(NamedTuple):
    """Latent attention with a gate on its values."""

    latent: LatentAttention
    gate: OutputGate

    def layer_memory(self) -> LayerMemory:
        return self.latent.layer_memory()

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        q, row = self.latent.keys(step, layer, x)
        attended = step.attend_latent(layer, q, row, self.latent.compressed.sizes.rank, self.latent.scale)
        if attended is None:
            return None
        gated = self.gate(step, layer, x, self.latent.values(step, layer, attended))
        return self.latent.out(step, gated, f"mla_out-{layer}")


class ExpandedAttention(NamedTuple):
    """Attention over keys and values expanded from the latent rows, as in older files."""

    compressed: LatentProjection
    kv_b: Linear
    out: Linear
    scale: float

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, compressed: LatentProjection, scale: float) -> ExpandedAttention:
        """Take `attn_kv_b` and `attn_output`. Raises InvalidModel."""
        s = compressed.sizes
        return cls(
            compressed,
            w.linear("attn_kv_b", s.rank, s.n_head * (s.nope + s.value)),
            w.linear("attn_output", s.n_head * s.value, n_embd),
            scale,
        )

    def layer_memory(self) -> LayerMemory:
        """Keys and values of all heads."""
        s = self.compressed.sizes
        return KeysValues(s.n_head * s.key, s.n_head * s.value)

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        s, n_tokens = self.compressed.sizes, x.ne[1]
        q, latent, rotate = self.compressed(step, layer, x)
        assert rotate is not None
        kv = self.kv_b(step, latent, f"kv-{layer}")
        head = (s.nope + s.value) * kv.nb[0]
        plain = view_3d(kv, s.nope, s.n_head, n_tokens, head, kv.nb[1])
        v = cont(view_3d(kv, s.value, s.n_head, n_tokens, head, kv.nb[1], s.nope * kv.nb[0]), name=f"Vcur-{layer}")
        k = concat(plain, repeat(rotate, s.rope, s.n_head, n_tokens, 1), 0, name=f"Kcur-{layer}")
        q = self.compressed.rotate(step, q, f"Qcur-{layer}", offset=s.nope)
        attended = step.attend(layer, self.compressed.apply_temperature(step, q), k, v, self.scale)
        return None if attended is None else self.out(step, attended, f"attn_out-{layer}")
