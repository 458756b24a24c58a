"""Low-rank hyper-connections (Qwen4): a gate for each element of each stream that a block reads."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import mul, reshape, rms_norm, scale, sigmoid, silu
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Linear, Pass
from llamado.models.parts.experts import add_up
from llamado.models.weights import RoleWeights


class StreamNorm(NamedTuple):
    """RMS norm of each stream, with a weight for each element of all."""

    weight: Tensor

    @classmethod
    def take(cls, w: RoleWeights, name: str, n_embd: int, n: int) -> StreamNorm:
        """Take `name`, of n · n_embd elements in one row or n. Raises InvalidModel."""
        flat = w.ne(f"{name}.weight")[1] == 1
        return cls(w.require(f"{name}.weight", n * n_embd) if flat else w.require(f"{name}.weight", n_embd, n))

    def __call__(self, step: Pass, x: Tensor) -> Tensor:
        """Norm streams [n_embd, n, n_tokens]."""
        return mul(rms_norm(x, step.norm_eps), reshape(self.weight, *x.ne[:2]))


class StreamGates(NamedTuple):
    """Mean of the normed and gated streams; the gates are a low-rank function of all streams."""

    norm: StreamNorm
    down: Linear
    up: Linear
    inject: Linear | None

    @classmethod
    def take(cls, w: RoleWeights, name: str, n_embd: int, n: int, rank: int, *, injects: bool = True) -> StreamGates:
        """Take `name_norm`, `name_down`, `name_up` and, if it `injects`, `name_inject`. Raises InvalidModel."""
        return cls(
            StreamNorm.take(w, f"{name}_norm", n_embd, n),
            w.linear(f"{name}_down", n * n_embd, rank),
            w.linear(f"{name}_up", rank, n * n_embd),
            w.linear(f"{name}_inject", n * n_embd, n) if injects else None,
        )

    def __call__(self, step: Pass, x: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
        """Return a block's input [n_embd, n_tokens] for streams [n_embd, n, n_tokens].

        The second result are the weights of the block's output for each stream, [n, n_tokens], if it `injects`.
        """
        n_embd, n, n_tokens, _ = x.ne
        row = reshape(self.norm(step, x), n * n_embd, n_tokens, name=f"{name}_norm")
        low = silu(scale(self.down(step, row, f"{name}_down"), 1.0 / n))
        gated = mul(row, sigmoid(self.up(step, low, f"{name}_gate")))
        seen = scale(add_up(step, reshape(gated, n_embd, n, n_tokens), f"{name}_sum"), 1.0 / n, name=f"{name}_mixed")
        if self.inject is None:
            return seen, None
        added = scale(self.inject(step, row, f"{name}_inject"), 1.0 / n)
        return seen, step.graph.expand(scale(sigmoid(added), 2.0))
