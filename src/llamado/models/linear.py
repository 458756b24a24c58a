"""Matrices with biases."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import add, mul_mat
from llamado.ggml.tensor import Tensor


class Linear(NamedTuple):
    """A matrix, and where the file has one a bias."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, name: str) -> Tensor:
        y = mul_mat(self.weight, x, name=name)
        return y if self.bias is None else add(y, self.bias, name)
