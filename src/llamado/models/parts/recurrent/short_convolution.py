"""Short gated convolution (LFM2): a mixer whose only state is the last few tokens."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import cont, mul, reshape, view_2d
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Linear, Pass
from llamado.models.memory import RecurrentState
from llamado.models.parts.mamba import causal_convolution
from llamado.models.weights import RoleWeights


class ShortConvolution(NamedTuple):
    """out(c · convolution(b · x)), where b, c and x are projected from the hidden state by one matrix."""

    project: Linear
    kernel: Tensor
    out: Linear

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, n: int) -> ShortConvolution:
        """Take `shortconv.in_proj`, `shortconv.conv` over `n` tokens and `shortconv.out_proj`. Raises InvalidModel."""
        return cls(
            w.linear("shortconv.in_proj", n_embd, 3 * n_embd),
            w.require("shortconv.conv.weight", n, n_embd),
            w.linear("shortconv.out_proj", n_embd, n_embd),
        )

    def layer_memory(self) -> RecurrentState:
        n, n_embd = self.kernel.ne[:2]
        return RecurrentState(((n - 1) * n_embd,))

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        n_embd, n_tokens = x.ne[:2]
        both = self.project(step, x, f"conv.in_proj-{layer}")
        b, c, x = (view_2d(both, n_embd, n_tokens, both.nb[1], i * n_embd * both.nb[0]) for i in range(3))
        mixed = reshape(mul(b, x), n_embd, n_tokens // step.n_seqs, step.n_seqs)
        y = causal_convolution(step, layer, 0, mixed, self.kernel)
        if step.is_cache_only(layer):
            return None
        return self.out(step, mul(reshape(y, n_embd, n_tokens), cont(c)), f"conv.out_proj-{layer}")
