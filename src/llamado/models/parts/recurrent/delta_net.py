"""Gated delta rule (arXiv 2412.06464): linear attention whose state is corrected by each token."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple, Protocol

from llamado.ggml.graph import (
    add,
    concat,
    cont,
    gated_delta_net,
    mul,
    repeat,
    reshape,
    rms_norm,
    scale,
    sigmoid,
    silu,
    softplus,
    unary,
    view_2d,
    view_3d,
    view_4d,
)
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear, Pass
from llamado.models.keys import Keys
from llamado.models.memory import RecurrentState
from llamado.models.parts.mamba import causal_convolution
from llamado.models.weights import RoleWeights

CONV, STATE = 0, 1
"""Indices of a layer's states: last inputs of the convolution, and the state of the heads."""


class DeltaSizes(NamedTuple):
    """Head size (keys and values), number of key heads and of value heads, and convolution length in tokens.

    Each query and key head is shared by several value heads.
    """

    head: int
    n_keys: int
    n_values: int
    kernel: int

    @classmethod
    def read(cls, keys: Keys) -> DeltaSizes:
        """Read the sizes. Raises GgufError or InvalidModel."""
        sizes = cls(
            head=keys.int_("ssm.state_size"),
            n_keys=keys.int_("ssm.group_count"),
            n_values=keys.int_("ssm.time_step_rank"),
            kernel=keys.int_("ssm.conv_kernel"),
        )
        inner = keys.int_("ssm.inner_size")
        if sizes.n_values % sizes.n_keys or inner != sizes.head * sizes.n_values:
            raise InvalidModel(
                f"metadata keys '{keys.name('ssm.group_count')}', '{keys.name('ssm.time_step_rank')}' and "
                f"'{keys.name('ssm.inner_size')}' are {sizes.n_keys}, {sizes.n_values} and {inner}; a multiple of the "
                f"first and {sizes.head} times the second are expected"
            )
        return sizes

    @property
    def channels(self) -> int:
        """Return the elements of all queries, keys and values."""
        return self.head * (2 * self.n_keys + self.n_values)

    @property
    def value(self) -> int:
        """Return the elements of all values."""
        return self.head * self.n_values

    def layer_memory(self) -> RecurrentState:
        return RecurrentState(((self.kernel - 1) * self.channels, self.head * self.value))


class GateProjection(Protocol):
    """Projection of hidden states to log decays and update strengths, [1, heads, tokens, sequences] each."""

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor]: ...


class Decay(NamedTuple):
    """Log decay per head: softplus(x + shift) · factor, where the factor is negative."""

    shift: Tensor
    factor: Tensor

    @classmethod
    def take(cls, w: RoleWeights, n_heads: int) -> Decay:
        """Take `ssm_dt.bias` and `ssm_a`. Raises InvalidModel."""
        return cls(w.require("ssm_dt.bias", n_heads), w.require("ssm_a", n_heads))

    def __call__(self, x: Tensor, name: str) -> Tensor:
        return mul(softplus(add(x, self.shift)), self.factor, name)


class SeparateGates(NamedTuple):
    """Separate matrices for log decays and update strengths."""

    alpha: Linear
    beta: Linear
    decay: Decay

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, n_heads: int) -> SeparateGates:
        """Take `ssm_alpha`, `ssm_beta` and the weights of Decay. Raises InvalidModel."""
        alpha, beta = w.linear("ssm_alpha", n_embd, n_heads), w.linear("ssm_beta", n_embd, n_heads)
        return cls(alpha, beta, Decay.take(w, n_heads))

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        beta = sigmoid(self.beta(step, x, f"beta-{layer}"), f"beta_sigmoid-{layer}")
        decay = self.decay(self.alpha(step, x, f"alpha-{layer}"), f"gate-{layer}")
        shape = 1, beta.ne[0], x.ne[1] // step.n_seqs, step.n_seqs
        return reshape(decay, *shape), reshape(beta, *shape)


class FusedGates(NamedTuple):
    """One matrix: for each key head, the update strengths of its value heads, then their decay inputs."""

    both: Linear
    decay: Decay
    n_keys: int

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, sizes: DeltaSizes) -> FusedGates:
        """Take `ssm_ba` and the weights of Decay. Raises InvalidModel."""
        return cls(w.linear("ssm_ba", n_embd, 2 * sizes.n_values), Decay.take(w, sizes.n_values), sizes.n_keys)

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        n_tokens, n_heads = x.ne[1], self.both.weight.ne[1] // 2
        each, size = n_heads // self.n_keys, 4
        y = reshape(self.both(step, x, f"linear_attn_mixed_ba-{layer}"), 2 * each, self.n_keys, n_tokens)
        beta, alpha = (
            cont(view_4d(y, each, self.n_keys, n_tokens, 1, *y.nb[1:], at * each * size), n_heads, n_tokens)
            for at in (0, 1)
        )
        shape = 1, n_heads, n_tokens // step.n_seqs, step.n_seqs
        decay = self.decay(alpha, f"gate-{layer}")
        return reshape(decay, *shape), reshape(sigmoid(beta, f"beta_sigmoid-{layer}"), *shape)


class InputProjection(Protocol):
    """Projection of hidden states to the queries, keys and values of all heads [channels, n_tokens], and gates."""

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor]: ...


class SeparateInputs(NamedTuple):
    """Separate matrices for queries, keys and values, and for gates."""

    qkv: Linear
    gate: Linear

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.qkv(step, x, f"linear_attn_qkv_mixed-{layer}"), self.gate(step, x, f"z-{layer}")


class FusedInputs(NamedTuple):
    """One matrix: for each key head, its query, its key, and the values and gates of its value heads."""

    all: Linear
    sizes: DeltaSizes

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        s, n_tokens = self.sizes, x.ne[1]
        values = s.value // s.n_keys
        y = reshape(self.all(step, x, f"linear_attn_mixed_qkvz-{layer}"), 2 * (s.head + values), s.n_keys, n_tokens)
        parts, at = [], 0
        for n in (s.head, s.head, values, values):
            part = view_3d(y, n, s.n_keys, n_tokens, y.nb[1], y.nb[2], at * y.nb[0])
            parts.append(cont(part, n * s.n_keys, n_tokens))
            at += n
        q, k, v, gate = parts
        return concat(concat(q, k, 0), v, 0, f"qkv_mixed-{layer}"), gate


def take_inputs(w: RoleWeights, n_embd: int, sizes: DeltaSizes) -> InputProjection:
    """Take `attn_qkv` and `attn_gate`, or `ssm_in` in the first files of Qwen3-Next. Raises InvalidModel."""
    if w.has("ssm_in.weight"):
        return FusedInputs(w.linear("ssm_in", n_embd, sizes.channels + sizes.value), sizes)
    qkv, gate = w.linear("attn_qkv", n_embd, sizes.channels), w.linear("attn_gate", n_embd, sizes.value)
    return SeparateInputs(qkv, gate)


class DeltaNet(NamedTuple):
    """Gated DeltaNet mixer: a convolution over queries, keys and values, the delta rule, and an output gate.

    With `interleaved`, a key head serves consecutive value heads, otherwise every n-th.
    """

    sizes: DeltaSizes
    inputs: InputProjection
    kernel: Tensor
    gates: GateProjection
    norm: Tensor
    out: Linear
    interleaved: bool
    gate: UnaryOp = UnaryOp.SILU

    @classmethod
    def take(
        cls, w: RoleWeights, n_embd: int, sizes: DeltaSizes, gates: GateProjection, *, interleaved: bool
    ) -> DeltaNet:
        """Take the weights of `take_inputs`, `ssm_conv1d`, `ssm_norm` and `ssm_out`. Raises InvalidModel."""
        return cls(
            sizes=sizes,
            inputs=take_inputs(w, n_embd, sizes),
            kernel=w.require("ssm_conv1d.weight", sizes.kernel, sizes.channels),
            gates=gates,
            norm=w.require("ssm_norm.weight", sizes.head),
            out=w.linear("ssm_out", sizes.value, n_embd),
            interleaved=interleaved,
        )

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        s, n_seqs = self.sizes, step.n_seqs
        n, size = x.ne[1] // n_seqs, 4
        qkv, gate = (step.graph.expand(t) for t in self.inputs(step, layer, x))
        decay, beta = (step.graph.expand(t) for t in self.gates(step, layer, x))
        mixed = causal_convolution(step, layer, CONV, reshape(qkv, s.channels, n, n_seqs), self.kernel)
        y = silu(mixed, f"conv_output_silu-{layer}")
        row, many = s.head * size, s.n_keys * s.head * size
        q, k, v = (
            view_4d(y, s.head, heads, n, n_seqs, row, y.nb[1], y.nb[2], at)
            for heads, at in ((s.n_keys, 0), (s.n_keys, many), (s.n_values, 2 * many))
        )
        q, k = (self._repeat_heads(unit_length(step, heads)) for heads in (q, k))
        found, after = delta_rule(step, layer, STATE, q, k, v, decay, beta, f"attn_output-{layer}")
        step.store_states(layer, STATE, after)
        if step.is_cache_only(layer):
            return None
        z = unary(reshape(gate, s.head, s.n_values, n, n_seqs), self.gate)
        y = mul(step.norm(found, self.norm, f"attn_out_norm-{layer}"), z, f"final_output-{layer}")
        return self.out(step, reshape(y, s.value, n * n_seqs), f"linear_attn_out-{layer}")

    def _repeat_heads(self, heads: Tensor) -> Tensor:
        """Repeat key heads so that each value head has its own; the operation itself repeats them cyclically."""
        s = self.sizes
        if not self.interleaved or s.n_keys == s.n_values:
            return heads
        n, n_seqs = heads.ne[2:]
        each = s.n_values // s.n_keys
        spread = repeat(reshape(heads, s.head, 1, s.n_keys, n * n_seqs), s.head, each, s.n_keys, n * n_seqs)
        return reshape(spread, s.head, s.n_values, n, n_seqs)


def unit_length(step: Pass, heads: Tensor, eps: float = 0.0) -> Tensor:
    """Scale heads to length 1; `eps` (default: the norms' epsilon) is added to the squared length."""
    n = heads.ne[0]
    return scale(rms_norm(heads, (eps or step.norm_eps) / n), 1.0 / sqrt(n))


def delta_rule(
    step: Pass, layer: int, number: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, name: str
) -> tuple[Tensor, Tensor]:
    """Apply the delta rule to state `number` of a layer: outputs [size, heads, tokens, sequences], and the new states.

    The states are [all elements of a sequence, sequences].
    """
    size, n_heads, n, n_seqs = v.ne
    for tensor in (q, k, v):
        step.graph.expand(tensor)
    states = reshape(step.read_states(layer, number), size, size, n_heads, n_seqs)
    y = gated_delta_net(q, k, v, decay, beta, states, name=name)
    row, token = 4 * size, 4 * size * n_heads
    found = view_4d(y, size, n_heads, n, n_seqs, row, token, token * n)
    return found, view_2d(y, size * size * n_heads, n_seqs, token * size, token * n * n_seqs)
