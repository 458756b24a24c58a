"""Normalization of rows."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from llamado.ggml.graph import add, mul, norm, rms_norm
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Pass
from llamado.models.weights import RoleWeights


class Norm(Protocol):
    """Norm of the rows of x, with the model's epsilon."""

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor: ...


class RmsNorm(NamedTuple):
    """RMS norm of each row, with a weight and optionally a bias (arXiv 1910.07467)."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def take(cls, w: RoleWeights, name: str, n: int, *, biased: bool = False) -> RmsNorm:
        """Take the norm `name` of rows of `n`. Raises InvalidModel."""
        return cls(w.require(f"{name}.weight", n), w.require(f"{name}.bias", n) if biased else None)

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        y = step.norm(x, self.weight, name)
        return y if self.bias is None else add(y, self.bias, name)


class UnitNorm(NamedTuple):
    """RMS norm of each row, without a weight."""

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, step.norm_eps, name)


class UnitLayerNorm(NamedTuple):
    """Layer norm of each row, without a weight."""

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        return norm(x, step.norm_eps, name)


class LayerNorm(NamedTuple):
    """Layer norm of each row, with a weight and usually a bias (arXiv 1607.06450)."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def take(cls, w: RoleWeights, name: str, n: int, *, biased: bool = True) -> LayerNorm:
        """Take the norm `name` of rows of `n`. Raises InvalidModel."""
        return cls(w.require(f"{name}.weight", n), w.require(f"{name}.bias", n) if biased else None)

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        y = mul(norm(x, step.norm_eps), self.weight, name)
        return y if self.bias is None else add(y, self.bias, name)


def take_head_norm(w: RoleWeights, name: str, dim: int, n_head: int) -> LayerNorm | None:
    """Take the layer norm `name` with separate weights per head; return None if the file has none.

    Raises InvalidModel.
    """
    weight = w.optional(f"{name}.weight", dim, n_head)
    return None if weight is None else LayerNorm(weight, None)
