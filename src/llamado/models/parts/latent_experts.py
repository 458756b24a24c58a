"""Mixtures of experts that work on a narrower hidden state."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import add
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Linear, Pass
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward
from llamado.models.parts.norms import Norm


class LatentMixture(NamedTuple):
    """Mixture of experts on a hidden state narrowed by `down` and widened again by `up`, if present.

    The router and the shared network see the full hidden state. `norm` applies to the experts' output.
    """

    experts: Mixture
    shared: FeedForward | None
    down: Linear | None
    up: Linear | None
    norm: Norm | None = None

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        latent = x if self.down is None else self.down(step, x, f"ffn_latent_down-{layer}")
        y = self.experts(step, layer, latent, x)
        if self.norm is not None:
            y = self.norm(step, y, f"ffn_latent_norm-{layer}")
        if self.up is not None:
            y = self.up(step, y, f"ffn_latent_up-{layer}")
        return y if self.shared is None else add(y, self.shared(step, layer, x), f"ffn_out-{layer}")
