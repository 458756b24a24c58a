"""Normalization of rows."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from llamado.ggml.graph import add, mul, norm, rms_norm
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Pass, Step
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

    def __call__(self, step: Step, x: Tensor, name: str) -> Tensor:
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

    def __call__(self, step: Step, x: Tensor, name: str) -> Tensor:
        y = mul(norm(x, step.norm_eps), self.weight, name)
        return y if self.bias is None else add(y, self.bias, name)


def take_head_norms(w: RoleWeights, dim: int, n_head: int, n_head_kv: int) -> tuple[LayerNorm | None, LayerNorm | None]:
    """Take the layer norms of queries and keys with separate weights per head, if the file has them.

    Raises InvalidModel.
    """
    q = w.optional("attn_q_norm.weight", dim, n_head)
    k = w.optional("attn_k_norm.weight", dim, n_head_kv)
    return None if q is None else LayerNorm(q, None), None if k is None else LayerNorm(k, None)
