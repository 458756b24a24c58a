"""Kimi Delta Attention (KDA, arXiv 2510.26692): the gated delta rule with a decay per key element."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import add, mul, reshape, scale, sigmoid, silu, softplus
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Linear, Pass
from llamado.models.memory import RecurrentState
from llamado.models.parts.mamba import causal_convolution
from llamado.models.parts.recurrent.delta_net import delta_rule, unit_length
from llamado.models.weights import RoleWeights

_STATE = 3
"""Index of the heads' state, after those of three convolutions."""


class LowRankLinear(NamedTuple):
    """A low-rank matrix."""

    a: Linear
    b: Linear

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        return self.b(step, self.a(step, x, f"{name}_a"), name)


def _take(w: RoleWeights, name: str, n_embd: int, narrow: int, n: int) -> LowRankLinear | Linear:
    """Take `name`, or `name_a` and, if present, `name_b`."""
    if w.has(f"{name}.weight"):
        return w.linear(name, n_embd, n)
    if not w.has(f"{name}_b.weight"):
        return w.linear(f"{name}_a", n_embd, n)
    return LowRankLinear(w.linear(f"{name}_a", n_embd, narrow), w.linear(f"{name}_b", narrow, n))


class KimiDelta(NamedTuple):
    """KDA mixer: a convolution each for queries, keys and values, the delta rule, and an output gate.

    Log decays are softplus(x + shift) · factor, or with a negative `bound`, limited to it: sigmoid((x + shift) ·
    |factor|) · bound.
    """

    head: int
    n_heads: int
    qkv: tuple[Linear, Linear, Linear]
    kernels: tuple[Tensor, Tensor, Tensor]
    forget: LowRankLinear | Linear
    shift: Tensor
    factor: Tensor
    beta: Linear
    gate: LowRankLinear | Linear
    norm: Tensor
    out: Linear
    bound: float
    negative: bool
    eps: float

    @classmethod
    def take(
        cls,
        w: RoleWeights,
        n_embd: int,
        head: int,
        n_heads: int,
        kernel: int,
        bound: float = 0.0,
        *,
        negative: bool = False,
        eps: float = 0.0,
    ) -> KimiDelta:
        """Take the projections, convolutions, gates, norm and output. Raises InvalidModel.

        Tensors: `attn_q`, `attn_k` and `attn_v`, `ssm_conv1d_q` and its kin, `ssm_f_a`, `ssm_dt`, `ssm_a`, `ssm_beta`,
        `ssm_g_a`, `ssm_norm` and `attn_output`, and if present `ssm_f_b` and `ssm_g_b`, or `ssm_g`. `negative`: `ssm_a`
        is negative with a bound, too. `eps`: added to squared lengths, if it differs from the norms' epsilon.
        """
        n = head * n_heads
        q, k, v = (w.linear(f"attn_{name}", n_embd, n) for name in "qkv")
        of_q, of_k, of_v = (w.require(f"ssm_conv1d_{name}.weight", kernel, 1, n) for name in "qkv")
        return cls(
            head=head,
            n_heads=n_heads,
            qkv=(q, k, v),
            kernels=(of_q, of_k, of_v),
            forget=_take(w, "ssm_f", n_embd, head, n),
            shift=w.require("ssm_dt.bias", n),
            factor=w.require("ssm_a", *((1,) if w.ne("ssm_a")[0] == 1 else ()), n_heads),
            beta=w.linear("ssm_beta", n_embd, n_heads),
            gate=_take(w, "ssm_g", n_embd, head, n),
            norm=w.require("ssm_norm.weight", head),
            out=w.linear("attn_output", n, n_embd),
            bound=bound,
            negative=negative,
            eps=eps,
        )

    def layer_memory(self) -> RecurrentState:
        n = self.head * self.n_heads
        before = (self.kernels[0].ne[0] - 1) * n
        return RecurrentState((before, before, before, self.head * n))

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        n_tokens, n_seqs = x.ne[1], step.n_seqs
        heads = self.head, self.n_heads, n_tokens // n_seqs, n_seqs
        rows = [linear(step, x, f"{name}cur-{layer}") for linear, name in zip(self.qkv, "QKV", strict=True)]
        decay = self._decay(reshape(add(self.forget(step, x, f"g1-{layer}"), self.shift), *heads[:2], n_tokens))
        beta = sigmoid(self.beta(step, x, f"kda_beta-{layer}"))
        gate = sigmoid(self.gate(step, x, f"g2-{layer}"))
        for tensor in (*rows, decay, beta, gate):
            step.graph.expand(tensor)
        q, k, v = (
            reshape(
                silu(causal_convolution(step, layer, i, reshape(row, row.ne[0], *heads[2:]), self._kernel(i))), *heads
            )
            for i, row in enumerate(rows)
        )
        decay, beta = reshape(decay, *heads), reshape(beta, 1, *heads[1:])
        q, k = unit_length(step, q, self.eps), unit_length(step, k, self.eps)
        found, after = delta_rule(step, layer, _STATE, q, k, v, decay, beta, f"attn_output-{layer}")
        step.store_states(layer, _STATE, after)
        if step.is_cache_only(layer):
            return None
        y = mul(step.norm(found, self.norm, f"kda_normed-{layer}"), reshape(gate, *heads))
        return self.out(step, reshape(y, self.head * self.n_heads, n_tokens), f"kda_out-{layer}")

    def _decay(self, x: Tensor) -> Tensor:
        """Return the log decays of heads."""
        factor = reshape(self.factor, 1, self.n_heads)
        if not self.bound:
            return mul(softplus(x), factor)
        x = mul(x, factor)
        return scale(sigmoid(scale(x, -1.0) if self.negative else x), self.bound)

    def _kernel(self, i: int) -> Tensor:
        n, _, channels, _ = self.kernels[i].ne
        return reshape(self.kernels[i], n, channels)
