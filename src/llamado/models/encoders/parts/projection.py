"""Projectors of two matrices with an activation between them."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import unary
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.forward import Linear
from llamado.models.weights import RoleWeights


class Projection(NamedTuple):
    """Two matrices, with biases as far as the file has them, and an activation between them."""

    up: Linear
    down: Linear
    activation: UnaryOp = UnaryOp.GELU

    @classmethod
    def take(cls, w: RoleWeights, up: str, down: str, n_in: int, activation: UnaryOp = UnaryOp.GELU) -> Projection:
        """Take the matrices `up` and `down`, whose widths are those in the file. Raises InvalidModel."""
        n_between, n_out = w.ne(f"{up}.weight")[1], w.ne(f"{down}.weight")[1]
        return cls(w.linear(up, n_in, n_between), w.linear(down, n_between, n_out), activation)

    @property
    def n_out(self) -> int:
        """Width of the result."""
        return self.down.weight.ne[1]

    def __call__(self, step: EncoderPass, x: Tensor, name: str) -> Tensor:
        x = unary(self.up(step, x, f"{name}_up"), self.activation)
        return self.down(step, x, f"{name}_down")
