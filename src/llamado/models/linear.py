"""Matrices with biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from llamado.ggml.graph import add
from llamado.ggml.tensor import Tensor

if TYPE_CHECKING:
    from llamado.models.base import Pass


class Linear(NamedTuple):
    """A matrix, and where the file has one a bias."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        y = step.mul_mat(self.weight, x, name)
        return y if self.bias is None else add(y, self.bias, name)
