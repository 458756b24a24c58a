"""Feed-forward networks: functions of each token alone."""

from __future__ import annotations

from math import inf
from typing import NamedTuple, Protocol

from llamado.ggml.graph import clamp, glu, glu_split, mul, scale, sigmoid, silu, sqr, swiglu_oai, tanh, unary
from llamado.ggml.ops import GluOp, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Linear, Pass, Projection
from llamado.models.weights import RoleWeights

_ALPHA, _LIMIT = 1.702, 7.0
"""Constants of gpt-oss' gated activation."""


class FeedForward(Protocol):
    """Feed-forward network: F32 [n_embd, n_tokens] to the same shape."""

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor: ...


class Situ(NamedTuple):
    """Gated activation with soft bounds (Kimi K3).

    `beta` · tanh(gate / beta) · sigmoid(gate) times `linear_beta` · tanh(up / linear_beta), or times up if linear_beta
    is 0.
    """

    beta: float
    linear_beta: float

    def __call__(self, gate: Tensor, up: Tensor, name: str) -> Tensor:
        bent = mul(_soft_bound(gate, self.beta), sigmoid(gate))
        return mul(bent, _soft_bound(up, self.linear_beta) if self.linear_beta else up, name)


def _soft_bound(x: Tensor, bound: float) -> Tensor:
    return scale(tanh(scale(x, 1.0 / bound)), bound)


def limited_glu(gate: Tensor, up: Tensor, activation: GluOp | Situ, limit: float, name: str) -> Tensor:
    """act(gate) · up with both factors at most `limit`, and the second at least -`limit`; 0: no limit.

    The gate's limit applies to the activation's input for SWIGLU_CLAMP, to its output for others. SWIGLU_OAI has a
    limit of its own.
    """
    if activation is GluOp.SWIGLU_OAI:
        return swiglu_oai(gate, up, _ALPHA, _LIMIT, name)
    if isinstance(activation, Situ):
        return activation(gate, up, name)
    before = activation is GluOp.SWIGLU_CLAMP
    if before:
        activation = GluOp.SWIGLU
    if not limit:
        return glu_split(gate, up, activation, name)
    up = clamp(up, -limit, limit)
    if before:
        return glu_split(clamp(gate, -inf, limit), up, activation, name)
    assert activation is GluOp.SWIGLU
    return mul(clamp(silu(gate), -inf, limit), up, name)


class GatedFeedForward(NamedTuple):
    """down(act(gate x) · up x), as in SwiGLU and GEGLU (arXiv 2002.05202); `limit`: see `limited_glu`."""

    gate: Projection
    up: Projection
    down: Projection
    activation: GluOp | Situ
    limit: float = 0.0

    @classmethod
    def take(
        cls, w: RoleWeights, n_embd: int, n_ff: int, activation: GluOp | Situ = GluOp.SWIGLU, *, suffix: str = ""
    ) -> GatedFeedForward:
        """Take `ffn_gate`, `ffn_up` and `ffn_down`, with any biases and an optional name suffix.

        Raises InvalidModel.
        """
        return cls(
            w.linear(f"ffn_gate{suffix}", n_embd, n_ff),
            w.linear(f"ffn_up{suffix}", n_embd, n_ff),
            w.linear(f"ffn_down{suffix}", n_ff, n_embd),
            activation,
        )

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        gate, up = self.gate(step, x, f"ffn_gate-{layer}"), self.up(step, x, f"ffn_up-{layer}")
        h = limited_glu(gate, up, self.activation, self.limit, f"ffn_act-{layer}")
        return self.down(step, h, f"ffn_out-{layer}")


class FusedGatedFeedForward(NamedTuple):
    """Gated network with one matrix for the rows of gate and up."""

    gate_up: Linear
    down: Linear
    activation: GluOp

    @classmethod
    def take(
        cls, w: RoleWeights, n_embd: int, n_ff: int, activation: GluOp = GluOp.SWIGLU, *, suffix: str = ""
    ) -> FusedGatedFeedForward:
        """Take `ffn_up` of 2·n_ff rows, and `ffn_down`, with an optional name suffix. Raises InvalidModel."""
        up = w.linear(f"ffn_up{suffix}", n_embd, 2 * n_ff)
        return cls(up, w.linear(f"ffn_down{suffix}", n_ff, n_embd), activation)

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        both = self.gate_up(step, x, f"ffn_up-{layer}")
        return self.down(step, glu(both, self.activation, name=f"ffn_act-{layer}"), f"ffn_out-{layer}")


class UngatedFeedForward(NamedTuple):
    """down(act(up x)), with the activation squared if `squared`."""

    up: Linear
    down: Linear
    activation: UnaryOp
    squared: bool = False

    @classmethod
    def take(
        cls, w: RoleWeights, n_embd: int, n_ff: int, activation: UnaryOp, *, squared: bool = False, suffix: str = ""
    ) -> UngatedFeedForward:
        """Take `ffn_up` and `ffn_down`, with any biases and an optional name suffix. Raises InvalidModel."""
        up, down = w.linear(f"ffn_up{suffix}", n_embd, n_ff), w.linear(f"ffn_down{suffix}", n_ff, n_embd)
        return cls(up, down, activation, squared)

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        h = unary(self.up(step, x, f"ffn_up-{layer}"), self.activation, f"ffn_act-{layer}")
        if self.squared:
            h = sqr(h, f"ffn_sqr-{layer}")
        return self.down(step, h, f"ffn_out-{layer}")


class FeedForwardKind(NamedTuple):
    """Kind of feed-forward network: activation, and layout of the matrices.

    A `GluOp` has a gate; with `fused`, gate and up are the rows of one matrix. A `UnaryOp` has none; its output is
    squared if `squared`.
    """

    activation: GluOp | UnaryOp = GluOp.SWIGLU
    fused: bool = False
    squared: bool = False

    def take(self, w: RoleWeights, n_embd: int, n_ff: int, *, suffix: str = "") -> FeedForward:
        """Take the network's matrices, with any biases and an optional name suffix. Raises InvalidModel."""
        if isinstance(self.activation, UnaryOp):
            return UngatedFeedForward.take(w, n_embd, n_ff, self.activation, squared=self.squared, suffix=suffix)
        layout = FusedGatedFeedForward if self.fused else GatedFeedForward
        return layout.take(w, n_embd, n_ff, self.activation, suffix=suffix)


SWIGLU = FeedForwardKind()
FUSED_SWIGLU = FeedForwardKind(fused=True)
GEGLU = FeedForwardKind(GluOp.GEGLU)
GELU = FeedForwardKind(UnaryOp.GELU)
SQUARED_RELU = FeedForwardKind(UnaryOp.RELU, squared=True)
