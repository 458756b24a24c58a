"""Hyper-connections of low rank (Qwen4): how much each half of a layer sees of each element of each stream."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import mul, reshape, rms_norm, scale, sigmoid, silu
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Linear, Pass
from llamado.models.parts.experts import add_up
from llamado.models.weights import RoleWeights


class StreamNorm(NamedTuple):
    """Mean square 1 in each stream, and a scale for each element of all."""

    weight: Tensor

    @classmethod
    def take(cls, w: RoleWeights, name: str, n_embd: int, n: int) -> StreamNorm:
        """`name`, of n · n_embd elements in one row or n. Raises InvalidModel."""
        flat = w.ne(f"{name}.weight")[1] == 1
        return cls(w.need(f"{name}.weight", n * n_embd) if flat else w.need(f"{name}.weight", n_embd, n))

    def __call__(self, step: Pass, x: Tensor) -> Tensor:
        """Of streams [n_embd, n, n_tokens] the same."""
        return mul(rms_norm(x, step.norm_eps), reshape(self.weight, *x.ne[:2]))


class StreamGates(NamedTuple):
    """The mean of streams, normed and each element gated; the gates are made of all streams by two narrow matrices."""

    norm: StreamNorm
    down: Linear
    up: Linear
    inject: Linear | None

    @classmethod
    def take(cls, w: RoleWeights, name: str, n_embd: int, n: int, rank: int, *, injects: bool = True) -> StreamGates:
        """`name_norm`, `name_down`, `name_up` and where it `injects` `name_inject`. Raises InvalidModel."""
        return cls(
            StreamNorm.take(w, f"{name}_norm", n_embd, n),
            w.linear(f"{name}_down", n * n_embd, rank),
            w.linear(f"{name}_up", rank, n * n_embd),
            w.linear(f"{name}_inject", n * n_embd, n) if injects else None,
        )

    def __call__(self, step: Pass, x: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
        """Of streams [n_embd, n, n_tokens] what is seen of them [n_embd, n_tokens], and how much of what is made of it
        is added to each [n, n_tokens].
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
